"""Reductions along one axis or over all elements."""

from tilewire.kernels.op import Family, KernelOp
from tilewire.kernels.reduce.configs import enumerate_configs
from tilewire.kernels.reduce.op import build, self_test

REDUCE = KernelOp(
    name="reduce",
    families=(Family(enumerate_configs, build, self_test),),
)
