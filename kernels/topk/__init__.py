"""The k best elements of each row."""

from tilewire.kernels.op import KernelOp
from tilewire.kernels.topk.kernel import (
    topk_finish_kernel,
    topk_groups_kernel,
    topk_merge_kernel,
    topk_row_kernel,
    topk_select_kernel,
)
from tilewire.kernels.topk.op import prepare_topk, topk
from tilewire.kernels.topk.selftest import self_tests
from tilewire.kernels.topk.variants import variants

TOPK = KernelOp(
    name="topk",
    run=topk,
    prepare=prepare_topk,
    kernels=(
        topk_finish_kernel,
        topk_groups_kernel,
        topk_merge_kernel,
        topk_row_kernel,
        topk_select_kernel,
    ),
    variants=variants,
    self_tests=self_tests,
)
