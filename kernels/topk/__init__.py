"""The k best elements of each row."""

from tilewire.kernels.op import Family, KernelOp
from tilewire.kernels.topk.op import built, members, select_self_test, select_variant, selecting, self_test

# Search selects with the same binaries.
SELECTING = Family(selecting, select_variant, select_self_test)
TOPK = KernelOp(
    name="topk",
    families=(Family(members, lambda *member: built(*member).values(), self_test), SELECTING),
)
