"""Blocks of the search kernels. Pure: no torch, no Triton, no device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewire.kernels.matmul.configs import resolve_precision
from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES, unit_of
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.topk.configs import TAKEN, WIDTHS, Block, block_for, is_taken, width_of

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
# Most items of a search whose scores are all computed; in the interpreter, where tests search few items.
_MOST_ITEMS, _INTERPRETED_ITEMS = 8192, 40
# Blocks that hold the items of a query whose scores are computed again. Those of several queries rank them whole.
_SORTED = (
    *(Block(32, 1, 4), Block(64, 4, 4), Block(256, 1, 1, 64), Block(1024, 1, 1, 64), Block(2048, 2, 1, 64)),
    *(Block(4096, 4, 1, 128), Block(8192, 8, 1, 256)),
)
# What sorts more than so many in less time.
_MANY_SORTED, _MANY_BLOCK = 64, Block(1024, 4, 1, 128)
FINISH = (*_SORTED, _MANY_BLOCK, *TAKEN)


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
        is_distance: Whether scores are distances.
    """

    m: int
    n: int
    k: int
    best: int
    dtype: str
    precision: str = "ieee"
    is_aligned: bool = True
    is_plain: bool = True
    is_distance: bool = False

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
        kernel: `tma` or `pointer`, whose products select groups; `product`, `none` or `tile` where the scores of all items are
            computed, by a product, by the kernel for the scores of groups, or by tiles of distances.
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
        return self.kernel in ("product", "none", "tile")


# By the items of a group: groups of 8 are those of few items, often for many queries, and programs with few registers are
# many at once.
SCORES = {8: Score(1, 128, 1), 32: Score(1, 128, 4), 128: Score(1, 128, 8)}
# Blocks for so many groups of 8, over all queries, of so short items, that how many programs there are decides: 200,000
# queries among 1,000 items of 64 bfloat16, of which 10 are kept, took 3.50 ms with a program for each group, and 1.85 (of
# nine, the best for most of 21 searches; H200).
_MANY_GROUPS, _SHORT_ITEM, _MANY_SCORES = 1 << 13, 512, Score(4, 32, 1)
# The scores of all items by a product, whose blocks are chosen as those of any.
PRODUCT = Config("product", 128, 1, 1, 1, 1, group=1)
# The scores of all items where they are few, by the kernel for those of groups, and distances of all by tiles.
DIRECT = Config("none", 1, 8, 128, 1, 1, group=8, score=SCORES[8])
_TILE, _INTERPRETED_TILE = (Config("tile", block, block, 1, 4, 1, group=16) for block in (64, 16))
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
    """The blocks for `problem` on `target`: with its kind, one of `enumerate_configs`, or `PRODUCT`.

    `tma` is for any kind that is aligned.
    """
    whole = (DIRECT, tile_for(target)) if problem.is_distance else (DIRECT, PRODUCT)
    if target.backend == "interpreter":
        if problem.n <= _INTERPRETED_ITEMS:
            return DIRECT if problem.is_distance else PRODUCT
    elif problem.n <= _MOST_ITEMS:
        fastest = min(whole, key=functools.partial(_predicted_us, problem))
        if _predicted_us(problem, fastest) < _predicted_us(problem, None):
            return fastest
    fitting = [config for config in configs_for(problem, target) if not config.is_whole or problem.k <= config.block_k]
    fitting = [config for config in fitting if config.is_whole] or fitting
    number = next((number for number, config in enumerate(fitting) if config.block_m >= problem.m), len(fitting) - 1)
    # Few items: smaller tiles occupy more of the device.
    while number > 0 and _num_tiles(problem, fitting[number]) < target.num_sms:
        number -= 1
    group = group_for(problem, fitting[number])
    return replace(fitting[number], group=group, score=score_for(problem, group))


def tile_for(target: Target) -> Config:
    """The tile for the distances of all items."""
    return _INTERPRETED_TILE if target.backend == "interpreter" else _TILE


def finish_for(num_keys: int, best: int, *, is_scores: bool) -> Block:
    """The block that finds the `best` of so many keys or scores of a query."""
    if is_taken(num_keys, best, is_wide=is_scores):
        return block_for(num_keys, TAKEN)
    block = block_for(num_keys, _SORTED)
    return _MANY_BLOCK if block.block_n == _MANY_BLOCK.block_n and best > _MANY_SORTED else block


def _predicted_us(problem: Problem, config: Config | None) -> float:
    """Microseconds on an H200 by a way to compute the scores of all items; None: by groups.

    Constants were set by 311 measured searches. Only their ratios matter.
    """
    m, n, k, best = problem.m, problem.n, problem.k, problem.best
    is_float32 = problem.dtype == "float32"
    # Of each query: taken out one after the other, or sorted.
    finish_us = m * min(n * (1.3e-6 + 0.8e-6 * best), 1.5e-3 + 4.5e-6 * n + 5e-5 * best)
    if config is None:
        # The products, the groups that are selected, and their scores.
        multiply_us = m * n * k * (2e-8 if is_float32 else 5e-9)
        scores_us = best * (3e-4 + 3e-6 * max(k, 32))
        return 8 + 0.01 * k + multiply_us + m * (0.003 + 0.003 * (best > 4) + scores_us)
    if config == DIRECT:
        return 2 + 0.002 * k + m * -(-n // 8) * (9e-4 + 3e-6 * max(k, 128)) + finish_us
    if config == PRODUCT:
        moved_us = ((m + n) * k * ITEM_BYTES[problem.dtype] + 4 * m * n) / 3.5e6
        multiply_us = m * n * k * (5e-8 if is_float32 else 5e-9) + k * (7e-3 if is_float32 else 2e-3)
        # Norms of queries are a launch of their own.
        return 3 + 3 * (not problem.is_plain) + max(moved_us, multiply_us) + finish_us
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    return 2 + k * max(0.2, 3e-7 * tiles * config.block_m * config.block_n) + finish_us


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
    return _MANY_SCORES if group == 8 and is_many and problem.k <= _SHORT_ITEM else SCORES[group]


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
        yield problem, DIRECT
        if not is_aligned:
            # Operands are read one by one, wherever they lie.
            yield replace(problem, is_plain=False, is_distance=True), tile_for(target)
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
