"""Functions of one or two tensors, element by element."""

from tilewire.kernels.op import Family, KernelOp
from tilewire.kernels.pointwise.configs import enumerate_configs
from tilewire.kernels.pointwise.op import pointwise, prepare_pointwise
from tilewire.kernels.pointwise.selftest import self_test
from tilewire.kernels.pointwise.variants import build

POINTWISE = KernelOp(
    name="pointwise",
    run=pointwise,
    prepare=prepare_pointwise,
    families=(Family(enumerate_configs, build, self_test),),
)
