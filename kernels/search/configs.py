"""Blocks of the search kernels. Pure: no torch, no Triton, no device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewire.kernels.matmul.configs import resolve_precision
from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES, unit_of
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
# From so many queries on groups of 8 leave less to read again than they have orders more, where items are fewer than so many
# times the bytes of those that are kept.
_MANY_QUERIES, _MANY_BYTES = 64, 64
# Up to so many items, scores, and elements read for them (float32 last), the scores of all items are computed at once.
_DIRECT_ITEMS, _DIRECT_SCORES, _DIRECT_ELEMENTS = 4096, 1 << 15, (1 << 23, 1 << 25)
# The same in the interpreter, where tests search few items.
_INTERPRETED_DIRECT_ITEMS = 40
# Up to so many items in all, and for each that is kept, the scores of all are computed, however many queries there are: those
# of scattered groups take longer than those of tiles. For 64 queries among 8,192 items of 256 float16, of which 1,000 are
# kept, 107 µs and 53 (H200). For float32, which no matrix unit multiplies exactly, and up to so many elements of all items.
_FEW_ITEMS, _FEW_ELEMENTS, _KEPT_ITEMS, _MOST_ITEMS = 64, 1 << 13, 16, 8192
# Twice as many for each that is kept where items are short.
_SHORT_K = 128
# For other types (H200, 100 searches; as many again for each that is kept where items are long), and where scores are few.
_FEW_NARROW_ITEMS, _KEPT_NARROW_ITEMS, _LONG_K, _FEW_NARROW_SCORES = 256, 48, 256, 1 << 20
# Of few scores those of so many queries, whose elements are so many, are computed by tiles.
_TILED_QUERIES, _TILED_K = 32, 256
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
class Score:
    """Blocks of the launch that computes the scores of groups of items.

    Attributes:
        groups: Groups of a program.
        block_k: Elements summed at a time.
        num_warps: Warps of a program.
    """

    groups: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class Config:
    """Blocks and compiler options of the product, and blocks of the scores.

    Attributes:
        kernel: `tma` or `pointer`, whose products select groups; `none` or `tile` where the scores of all items are computed,
            by the kernel for the scores of groups or by tiles.
        block_m: Queries of a tile.
        block_n: Items of a tile.
        block_k: Elements summed at a time.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline.
        is_swapped: Whether items are the rows of the product.
        is_whole: Whether queries are held: K ≤ block_k.
        programs_per_sm: Programs on each multiprocessor, for `tma`.
        group: Items that leave one order.
        score: Blocks of the scores.
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
    score: Score = Score(1, 128, 4)

    @property
    def is_whole_scored(self) -> bool:
        """Whether the scores of all items are computed."""
        return self.kernel in ("none", "tile")


# By the items of a group: groups of 8 are those of few items, often for many queries, and programs with few registers are
# many at once.
_SCORES = {8: Score(1, 128, 1), 32: Score(1, 128, 4), 128: Score(1, 128, 8)}
# Blocks for so many groups of 8, over all queries, of so short items, that how many programs there are decides: 200,000
# queries among 1,000 items of 64 bfloat16, of which 10 are kept, took 3.50 ms with a program for each group, and 1.85 (of
# nine, the best for most of 21 searches; H200).
_MANY_GROUPS, _SHORT_ITEM, _MANY_SCORES = 1 << 13, 512, Score(4, 32, 1)
# The scores of all items: few by the kernel of any search, and more by tiles.
DIRECT = Config("none", 1, 8, 128, 1, 1, group=8, score=_SCORES[8])
# Of nine, 64 × 64 × 32 was within 10 % of the best for most of 30 searches, and twice the step for long items (H200).
DIRECT_TILE = Config("tile", 64, 64, 32, 4, 2, group=16)
_LONG_TILE, _LONG_TILE_K = replace(DIRECT_TILE, block_k=64), 128
_FEW_QUERIES_TILE, _FEW_QUERIES = replace(DIRECT_TILE, block_m=16, block_k=64), 48
_INTERPRETED_TILE = Config("tile", 16, 16, 32, 4, 1, group=16)
_INTERPRETED_TILES = (_INTERPRETED_TILE, replace(_INTERPRETED_TILE, block_k=64), replace(_INTERPRETED_TILE, block_n=32))
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
# Where there are no descriptors.
_SMALL = (
    Config("pointer", 16, 64, 64, 4, 2, is_swapped=True),
    Config("pointer", 64, 64, 64, 4, 2),
    Config("pointer", 128, 128, 32, 8, 2),
)
_SMALL_FLOAT32 = (
    Config("pointer", 16, 64, 32, 4, 2, is_swapped=True),
    Config("pointer", 64, 64, 32, 8, 2),
)
_INTERPRETED = (
    Config("tma", 16, 32, 32, 4, 1, is_swapped=True, is_whole=True, group=8),
    Config("tma", 16, 32, 32, 4, 1, group=8),
    Config("pointer", 16, 32, 32, 4, 1, is_swapped=True, group=8),
)


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its kind, one of `enumerate_configs`; `tma` for any kind that is aligned."""
    if _is_direct(problem, target):
        return _tile_for(problem, target) if _is_tiled(problem) else DIRECT
    fitting = [config for config in configs_for(problem, target) if not config.is_whole or problem.k <= config.block_k]
    fitting = [config for config in fitting if config.is_whole] or fitting
    number = next((number for number, config in enumerate(fitting) if config.block_m >= problem.m), len(fitting) - 1)
    # Few items: smaller tiles occupy more of the device.
    while number > 0 and _num_tiles(problem, fitting[number]) < target.num_sms:
        number -= 1
    group = group_for(problem, fitting[number])
    return replace(fitting[number], group=group, score=score_for(problem, group))


def tiles_for(dtype: str, target: Target) -> tuple[Config, Config, Config]:
    """Tiles for the scores of all items: of short ones, of long ones, and of any for few queries."""
    tiles = (DIRECT_TILE, _LONG_TILE, _FEW_QUERIES_TILE)
    short, long, few = _INTERPRETED_TILES if target.backend == "interpreter" else tiles
    # Without the matrix unit a longer step gains nothing.
    return short, short if dtype == "float32" else long, few


def _tile_for(problem: Problem, target: Target) -> Config:
    """The tile for the scores of all items."""
    short, long, few = tiles_for(problem.dtype, target)
    if problem.m <= _FEW_QUERIES:
        return few
    return long if problem.k > _LONG_TILE_K else short


def _is_tiled(problem: Problem) -> bool:
    """Whether the scores of all items are computed by tiles: they are many, or multiplied by matrix units."""
    is_tile = problem.m >= _TILED_QUERIES and problem.k <= _TILED_K and problem.dtype != "float32"
    return is_tile or problem.m * problem.n > _DIRECT_SCORES


def _is_direct(problem: Problem, target: Target) -> bool:
    most = _INTERPRETED_DIRECT_ITEMS if target.backend == "interpreter" else _DIRECT_ITEMS
    few, a_kept = _few_items(problem)
    if problem.n <= min(max(a_kept * problem.best, 0 if target.backend == "interpreter" else few), _MOST_ITEMS):
        return True
    scores, is_short = problem.m * problem.n, problem.k <= _SHORT_K and target.backend != "interpreter"
    if is_short and problem.dtype != "float32" and problem.n <= _MOST_ITEMS and scores <= _FEW_NARROW_SCORES:
        return True
    most_elements = _DIRECT_ELEMENTS[problem.dtype == "float32"]
    return problem.n <= most and scores <= _DIRECT_SCORES and scores * problem.k <= most_elements


def _few_items(problem: Problem) -> tuple[float, int]:
    """How many items are few, however many queries there are: in all, and for each that is kept."""
    if problem.dtype == "float32":
        few = min(_FEW_ITEMS, _FEW_ELEMENTS / max(1, problem.k))
        return few, _KEPT_ITEMS * (2 if problem.k <= _SHORT_K else 1)
    return _FEW_NARROW_ITEMS, _KEPT_NARROW_ITEMS * (2 if problem.k >= _LONG_K else 1)


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
    if problem.m >= _MANY_QUERIES and problem.n < _MANY_BYTES * problem.best * problem.k * ITEM_BYTES[problem.dtype]:
        return 8
    # Long rows are cheaper to compare than to read again; so are many.
    return 128 if problem.width == 16 and config.is_whole and problem.n > _MANY_ITEMS else 32


def score_for(problem: Problem, group: int) -> Score:
    """Blocks of the scores of the best groups."""
    is_many = problem.m * problem.best >= _MANY_GROUPS and problem.best >= _MANY_SCORES.groups
    return _MANY_SCORES if group == 8 and is_many and problem.k <= _SHORT_ITEM else _SCORES[group]


def invariant(problem: Problem) -> Problem:
    """A problem whose choice does not depend on the number of queries."""
    return replace(problem, m=64)


def configs_for(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Blocks for the dtype and alignment of `problem`, by rising number of queries, those with whole K first."""
    if target.backend == "interpreter":
        return _INTERPRETED[:2] if problem.is_aligned else _INTERPRETED[2:]
    if not target.has_tma:
        return _SMALL_FLOAT32 if problem.dtype == "float32" else _SMALL
    if problem.dtype == "float32":
        return _FLOAT32
    return _LOOP if problem.dtype == "int8" else (*_WHOLE, *_LOOP)


def enumerate_configs(target: Target) -> Iterator[tuple[Problem, Config]]:
    """Every kind of problem and configuration that `choose` can return on `target`."""
    for dtype, is_aligned in itertools.product(DTYPES, (True, False)):
        problem = Problem(1, 1, 64, 1, dtype, is_aligned=is_aligned)
        yield from ((problem, config) for config in dict.fromkeys((DIRECT, *tiles_for(dtype, target))))
        # Rows are copied to where a descriptor reads them; the interpreter also tests the kernels of devices without any.
        if is_aligned or not target.has_tma or target.backend == "interpreter":
            yield from _members(problem, target)


def _members(problem: Problem, target: Target) -> Iterator[tuple[Problem, Config]]:
    has_precisions = problem.dtype == "float32" and target.backend != "interpreter"
    for precision, width, is_plain in itertools.product(PRECISIONS, WIDTHS, (True, False)):
        if precision != PRECISIONS[0] and not has_precisions:
            continue
        kind = replace(problem, precision=precision, best=width, is_plain=is_plain)
        for config, n in itertools.product(configs_for(kind, target), (1, _MANY_ITEMS, _MANY_ITEMS + 1)):
            group = group_for(replace(kind, n=n), config)
            for m in (1, _MANY_GROUPS):
                yield kind, replace(config, group=group, score=score_for(replace(kind, m=m), group))
