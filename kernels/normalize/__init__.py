"""Layer, root-mean-square and 2-norm normalisation."""

from tilewire.kernels.normalize.op import enumerate_configs, self_test, variant
from tilewire.kernels.op import Family, KernelOp

NORMALIZE = KernelOp(
    name="normalize",
    families=(Family(enumerate_configs, variant, self_test),),
)
