"""Blocks of the search kernels. Pure: no torch, no Triton, no device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewire.kernels.matmul.configs import resolve_precision
from tilewire.kernels.runtime.kinds import FLOATS, unit_of
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.topk.configs import WIDTHS, Block, width_of

DTYPES = (*FLOATS, "int8")
METRICS = ("dot", "cosine", "l2")
PRECISIONS = ("ieee", "tf32", "tf32x3")
# Queries whose groups, or whose scores computed again, have more orders than this are cut: they take scratch memory.
MAX_ORDERS = 1 << 26
# Likewise with more blocks of queries: programs along the second axis of CUDA's grids.
MAX_QUERY_BLOCKS = 65_535
# Up to so many items, groups of 32 leave few orders.
_MANY_ITEMS = 1 << 18
# Scores of more than one in so many items are not computed again.
_FEW = 4
# Up to so many items, scores, and elements read for them (float32 last), the scores of all items are computed at once.
_DIRECT_ITEMS, _DIRECT_SCORES, _DIRECT_ELEMENTS = 4096, 1 << 15, (1 << 23, 1 << 25)
# The same in the interpreter, where tests search few items.
_INTERPRETED_DIRECT_ITEMS = 40
# Up to so many items, and elements of all of them, all scores are computed at once for any number of queries.
_FEW_ITEMS, _FEW_ELEMENTS = 64, 1 << 13
# Blocks that hold the items of a query whose scores are computed again. Those of several queries rank them whole.
FINISH = (
    *(Block(32, 1, 8), Block(64, 1, 4), Block(256, 1, 1, 64)),
    *(Block(1024, 4, 1, 128), Block(4096, 4, 1, 128), Block(8192, 8, 1, 256)),
)


@dataclass(frozen=True)
class Problem:
    """One search as the choice of blocks sees it.

    Attributes:
        m: Number of queries.
        n: Number of items.
        k: Elements of an item.
        best: Items kept of each query.
        dtype: Name of the inputs' dtype.
        precision: Precision mode of float32 products.
        is_aligned: Whether rows of queries and items start at multiples of 16 bytes.
        is_plain: Whether similarities are the products themselves: no norms, no bias.
    """

    m: int
    n: int
    k: int
    best: int
    dtype: str
    precision: str = "ieee"
    is_aligned: bool = True
    is_plain: bool = True

    @property
    def width(self) -> int:
        """The class of `best`."""
        return width_of(self.best)

    @property
    def unit(self) -> int:
        """By what kernels multiply the strides that they are given."""
        return unit_of(self.dtype, is_aligned=self.is_aligned)


@dataclass(frozen=True)
class Config:
    """Blocks and compiler options of the product.

    Attributes:
        kernel: `tma`, `pointer`, or `none`: no groups are selected, and all scores are computed as those of the best are.
        block_m: Queries of a tile.
        block_n: Items of a tile.
        block_k: Elements summed at a time.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline.
        is_swapped: Whether items are the rows of the product.
        is_whole: Whether queries are held: K ≤ block_k.
        programs_per_sm: Programs on each multiprocessor, for `tma`.
        group: Items that leave one order.
    """

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    is_swapped: bool = False
    is_whole: bool = False
    programs_per_sm: int = 1
    group: int = 32


# For few items. Its kernels are those of any search, without the product and the selection.
DIRECT = Config("none", 1, 8, 0, 0, 0, group=8)
_WHOLE = (
    Config("tma", 16, 128, 128, 4, 3, is_swapped=True, is_whole=True, programs_per_sm=2),
    Config("tma", 64, 128, 128, 4, 3, is_whole=True, programs_per_sm=2),
    Config("tma", 128, 128, 128, 8, 2, is_whole=True, programs_per_sm=2),
)
_LOOP = (
    Config("tma", 16, 128, 128, 4, 5, is_swapped=True),
    Config("tma", 64, 128, 128, 4, 4),
    Config("tma", 256, 128, 64, 8, 4),
)
# Of some 60 on an H200 those that are within 6 % of the best for 1 to 254 queries.
_FLOAT32 = (
    Config("tma", 16, 128, 64, 4, 3, is_swapped=True, programs_per_sm=2),
    Config("tma", 32, 128, 64, 4, 3, is_swapped=True, programs_per_sm=2),
    Config("tma", 64, 128, 32, 4, 3, programs_per_sm=2),
)
_POINTER = (
    Config("pointer", 16, 128, 64, 4, 3, is_swapped=True),
    Config("pointer", 64, 128, 64, 4, 3),
)
_SMALL = (
    Config("pointer", 16, 64, 64, 4, 2, is_swapped=True),
    Config("pointer", 64, 64, 64, 4, 2),
    Config("pointer", 128, 128, 32, 8, 2),
)
_INTERPRETED = (
    Config("tma", 16, 32, 32, 4, 1, is_swapped=True, is_whole=True, group=8),
    Config("tma", 16, 32, 32, 4, 1, group=8),
    Config("pointer", 16, 32, 32, 4, 1, is_swapped=True, group=8),
)


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its kind, one of `enumerate_configs`, or `DIRECT`."""
    if _is_direct(problem, target):
        return DIRECT
    fitting = [config for config in configs_for(problem, target) if not config.is_whole or problem.k <= config.block_k]
    fitting = [config for config in fitting if config.is_whole] or fitting
    number = next((number for number, config in enumerate(fitting) if config.block_m >= problem.m), len(fitting) - 1)
    # Few items: smaller tiles occupy more of the device.
    while number > 0 and _num_tiles(problem, fitting[number]) < target.num_sms:
        number -= 1
    return replace(fitting[number], group=group_for(problem, fitting[number]))


def _is_direct(problem: Problem, target: Target) -> bool:
    most = _INTERPRETED_DIRECT_ITEMS if target.backend == "interpreter" else _DIRECT_ITEMS
    if problem.n <= _FEW_ITEMS and problem.n * problem.k <= _FEW_ELEMENTS and target.backend != "interpreter":
        return True
    scores = problem.m * problem.n
    most_elements = _DIRECT_ELEMENTS[problem.dtype == "float32"]
    return problem.n <= most and scores <= _DIRECT_SCORES and scores * problem.k <= most_elements


def _num_tiles(problem: Problem, config: Config) -> int:
    return -(-problem.m // config.block_m) * -(-problem.n // config.block_n)


def product_precision(precision: str, target: Target) -> str:
    """The precision of float32 products that select groups.

    Three products of tf32 err like one of float32, and scores are computed again.
    """
    has_tf32 = target.backend == "cuda"
    return "tf32x3" if precision == "ieee" and has_tf32 else resolve_precision(precision, target)


def group_for(problem: Problem, config: Config) -> int:
    """Items that leave one order: many save memory for orders, few save scores that are computed again."""
    if config.group < 32 or problem.width > 64 or _FEW * 32 * problem.best > problem.n:
        return 8
    # Long rows are cheaper to compare than to read again; so are many.
    return 128 if problem.width == 16 and config.is_whole and problem.n > _MANY_ITEMS else 32


def invariant(problem: Problem) -> Problem:
    """A problem whose choice does not depend on the number of queries."""
    return replace(problem, m=64)


def configs_for(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Blocks for the dtype and alignment of `problem`, by rising number of queries, those with whole K first."""
    if target.backend == "interpreter":
        return _INTERPRETED[:2] if problem.is_aligned else _INTERPRETED[2:]
    if not target.has_tma or not problem.is_aligned:
        return _pointers(problem, target)
    if problem.dtype == "float32":
        return _FLOAT32
    return _LOOP if problem.dtype == "int8" else (*_WHOLE, *_LOOP)


def _pointers(problem: Problem, target: Target) -> tuple[Config, ...]:
    base = _POINTER if target.has_tma else _SMALL
    if problem.dtype == "float32":
        base = base[:2]
        return tuple(
            replace(config, block_k=32, block_n=64, num_warps=4 if config.is_swapped else 8) for config in base
        )
    return base


def enumerate_configs(target: Target) -> Iterator[tuple[Problem, Config]]:
    """Every kind of problem and configuration that `choose` can return on `target`."""
    flags = (True, False)
    for dtype, is_aligned, is_plain, width in itertools.product(DTYPES, flags, flags, WIDTHS):
        for precision in PRECISIONS if dtype == "float32" and target.backend != "interpreter" else ("ieee",):
            problem = Problem(1, 1, 64, width, dtype, precision, is_aligned, is_plain)
            for config, n in itertools.product(configs_for(problem, target), (1, _MANY_ITEMS, _MANY_ITEMS + 1)):
                yield problem, replace(config, group=group_for(replace(problem, n=n), config))
