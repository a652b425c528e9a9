"""Reductions along one axis or over all elements."""

from tilewire.kernels.op import KernelOp
from tilewire.kernels.reduce.kernel import reduce_column_kernel, reduce_merge_kernel, reduce_row_kernel
from tilewire.kernels.reduce.op import prepare_reduce, reduce
from tilewire.kernels.reduce.selftest import self_tests
from tilewire.kernels.reduce.variants import variants

REDUCE = KernelOp(
    name="reduce",
    run=reduce,
    prepare=prepare_reduce,
    kernels=(
        reduce_column_kernel,
        reduce_merge_kernel,
        reduce_row_kernel,
    ),
    variants=variants,
    self_tests=self_tests,
)
