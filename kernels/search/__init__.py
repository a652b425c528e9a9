"""Exact nearest-neighbour search: a product and its k best columns."""

import itertools

from tilewire.kernels.op import Family, KernelOp
from tilewire.kernels.search.configs import DTYPES, FINISH, enumerate_configs
from tilewire.kernels.search.selftest import centre_self_test, finish_self_test, norms_self_test, self_test
from tilewire.kernels.search.variants import binaries, centre_variant, finish_variant, norms_variant
from tilewire.kernels.topk import SELECTING

SEARCH = KernelOp(
    name="search",
    families=(
        Family(lambda _target: [(dtype,) for dtype in DTYPES], norms_variant, norms_self_test),
        Family(enumerate_configs, binaries, self_test),
        Family(lambda _target: itertools.product(FINISH, (False, True)), finish_variant, finish_self_test),
        Family(lambda _target: [()], centre_variant, centre_self_test),
        SELECTING,
    ),
)
