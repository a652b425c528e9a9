"""Exact nearest-neighbour search: a product and its k best columns."""

from tilewire.kernels.op import Family, KernelOp
from tilewire.kernels.search.configs import DTYPES, enumerate_configs
from tilewire.kernels.search.op import prepare_search, search
from tilewire.kernels.search.selftest import norms_self_test, self_test
from tilewire.kernels.search.variants import binaries, norms_variant
from tilewire.kernels.topk.configs import WIDTHS
from tilewire.kernels.topk.selftest import merge_self_test
from tilewire.kernels.topk.variants import merging

SEARCH = KernelOp(
    name="search",
    run=search,
    prepare=prepare_search,
    families=(
        Family(lambda _target: [(dtype,) for dtype in DTYPES], norms_variant, norms_self_test),
        Family(enumerate_configs, binaries, self_test),
        Family(lambda _target: [(width,) for width in WIDTHS], merging, merge_self_test),
    ),
)
