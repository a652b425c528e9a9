"""Exact nearest-neighbour search: a product and its k best columns."""

from tilewire.kernels.op import KernelOp
from tilewire.kernels.search.kernel import (
    search_finish_kernel,
    search_norms_kernel,
    search_pointer_kernel,
    search_rescore_kernel,
    search_tma_kernel,
)
from tilewire.kernels.search.op import prepare_search, search
from tilewire.kernels.search.selftest import self_tests
from tilewire.kernels.search.variants import variants

SEARCH = KernelOp(
    name="search",
    run=search,
    prepare=prepare_search,
    kernels=(
        search_finish_kernel,
        search_norms_kernel,
        search_pointer_kernel,
        search_rescore_kernel,
        search_tma_kernel,
    ),
    variants=variants,
    self_tests=self_tests,
)
