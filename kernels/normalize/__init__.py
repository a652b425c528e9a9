"""Layer, root-mean-square and 2-norm normalisation."""

from tilewire.kernels.normalize.configs import enumerate_configs
from tilewire.kernels.normalize.op import normalize, prepare_normalize
from tilewire.kernels.normalize.selftest import self_test
from tilewire.kernels.normalize.variants import variant
from tilewire.kernels.op import Family, KernelOp

NORMALIZE = KernelOp(
    name="normalize",
    run=normalize,
    prepare=prepare_normalize,
    families=(Family(enumerate_configs, variant, self_test),),
)
