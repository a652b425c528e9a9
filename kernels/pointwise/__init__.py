"""Functions of one or two tensors, element by element."""

from tilewire.kernels.op import KernelOp
from tilewire.kernels.pointwise.kernel import pointwise_kernel
from tilewire.kernels.pointwise.op import pointwise, prepare_pointwise
from tilewire.kernels.pointwise.selftest import self_tests
from tilewire.kernels.pointwise.variants import variants

POINTWISE = KernelOp(
    name="pointwise",
    run=pointwise,
    prepare=prepare_pointwise,
    kernels=(pointwise_kernel,),
    variants=variants,
    self_tests=self_tests,
)
