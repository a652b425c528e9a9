"""Copies of many ranges of memory in one launch."""

from tilewire.kernels.copy.kernel import copy_ranges_kernel
from tilewire.kernels.copy.op import CopyPlan, copy_ranges, variants
from tilewire.kernels.copy.selftest import self_tests
from tilewire.kernels.op import KernelOp

COPY = KernelOp(
    name="staging",
    run=copy_ranges,
    prepare=CopyPlan,
    kernels=(copy_ranges_kernel,),
    variants=lambda _target: variants(),
    self_tests=self_tests,
)
