"""Layer, root-mean-square and 2-norm normalisation."""

from tilewire.kernels.normalize.kernel import normalize_loop_kernel, normalize_row_kernel
from tilewire.kernels.normalize.op import normalize, prepare_normalize
from tilewire.kernels.normalize.selftest import self_tests
from tilewire.kernels.normalize.variants import variants
from tilewire.kernels.op import KernelOp

NORMALIZE = KernelOp(
    name="normalize",
    run=normalize,
    prepare=prepare_normalize,
    kernels=(
        normalize_loop_kernel,
        normalize_row_kernel,
    ),
    variants=variants,
    self_tests=self_tests,
)
