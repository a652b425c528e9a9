"""Copies of many ranges of memory in one launch."""

from tilewire.kernels.copy.kernel import stretches_kernel
from tilewire.kernels.copy.op import PreparedCopy, copy_stretches, variants
from tilewire.kernels.copy.selftest import trials
from tilewire.kernels.op import KernelOp

COPY = KernelOp(
    name="staging",
    run=copy_stretches,
    prepare=PreparedCopy,
    kernels=(stretches_kernel,),
    variants=lambda _target: variants(),
    trials=trials,
)
