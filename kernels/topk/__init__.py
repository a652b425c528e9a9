"""The k best elements of each row."""

from tilewire.kernels.op import Family, KernelOp
from tilewire.kernels.topk.op import prepare_topk, topk
from tilewire.kernels.topk.selftest import select_self_test, self_test
from tilewire.kernels.topk.variants import built, members, select_variant, selecting

# Search selects with the same binaries.
SELECTING = Family(selecting, select_variant, select_self_test)
TOPK = KernelOp(
    name="topk",
    run=topk,
    prepare=prepare_topk,
    families=(Family(members, lambda *member: built(*member).values(), self_test), SELECTING),
)
