"""Functions of one or two tensors, element by element."""

from tilewire.kernels.op import Family, KernelOp
from tilewire.kernels.pointwise.op import build, enumerate_configs, self_test

POINTWISE = KernelOp(
    name="pointwise",
    families=(Family(enumerate_configs, build, self_test),),
)
