"""Copies of memory: many ranges, or the operands of a product, in one launch."""

from tilewire.kernels.copy.kernel import copy_operands_kernel, copy_ranges_kernel
from tilewire.kernels.copy.op import CopyPlan, copy_ranges, variants
from tilewire.kernels.copy.operands import variants as operand_variants
from tilewire.kernels.copy.selftest import self_tests
from tilewire.kernels.op import KernelOp

COPY = KernelOp(
    name="staging",
    run=copy_ranges,
    prepare=CopyPlan,
    kernels=(copy_ranges_kernel, copy_operands_kernel),
    variants=lambda target: [*variants(), *operand_variants(target)],
    self_tests=self_tests,
)
