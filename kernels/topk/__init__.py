"""The k best elements of each row."""

from tilewire.kernels.op import Family, KernelOp
from tilewire.kernels.topk.configs import WIDTHS
from tilewire.kernels.topk.op import prepare_topk, topk
from tilewire.kernels.topk.selftest import merge_self_test, self_test
from tilewire.kernels.topk.variants import built, members, merging

TOPK = KernelOp(
    name="topk",
    run=topk,
    prepare=prepare_topk,
    families=(
        Family(members, lambda *member: built(*member).values(), self_test),
        Family(lambda _target: [(width,) for width in WIDTHS], merging, merge_self_test),
    ),
)
