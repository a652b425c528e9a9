"""Blocks of the top-k kernels. Pure: no torch, no Triton, no device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import Target

MAX_K = 1024
# Rows with more kept keys than this at once are cut: keys take scratch memory.
MAX_KEPT = 1 << 25
# Rows of up to so many elements are sorted whole.
SHORT = 64
# Up to each of these k, rows are grouped alike.
WIDTHS = (16, 64, 256, 1024)


@dataclass(frozen=True)
class Problem:
    """One top-k as the choice of kernels sees it.

    Attributes:
        rows: Number of rows.
        n: Elements of a row.
        k: Elements kept of each row.
        dtype: Name of the input's dtype.
        is_aligned: Whether rows begin at multiples of 16 bytes.
    """

    rows: int
    n: int
    k: int
    dtype: str
    is_aligned: bool = True

    @property
    def num_places(self) -> int:
        """Elements of whole 16-byte pieces that hold a row, however it begins."""
        return self.n if self.is_aligned else self.n + 16 // ITEM_BYTES[self.dtype] - 1


@dataclass(frozen=True)
class Block:
    """Blocks of one kernel.

    Attributes:
        block_n: Elements, orders or keys of one program.
        num_warps: Warps of a program.
        block_rows: Rows of a program.
        sort: Keys that are sorted at a time; 0: the best is taken out of the others, again and again.
    """

    block_n: int
    num_warps: int
    block_rows: int = 1
    sort: int = 32


@dataclass(frozen=True)
class Config:
    """Kernels and blocks of one top-k.

    Attributes:
        row: Blocks where a row is held by one program; None for the three kernels below.
        groups: Blocks that read a long row once.
        group: Neighbours that leave one order.
        select: Blocks that select groups, by rising length, each of at least k. Those of several rows hold all of a row.
        finish: Blocks that hold the elements of k groups.
    """

    row: Block | None = None
    groups: Block | None = None
    group: int = 0
    select: tuple[Block, ...] = ()
    finish: Block | None = None

    def scratch(self, k: int) -> int:
        """Keys in scratch memory for each row: those to sort, twice; none where rows are sorted whole, or not sorted."""
        is_sorted_once = self.row is not None and (self.row.block_n <= SHORT or not self.row.sort)
        return 0 if is_sorted_once else 2 * num_kept(k)


# The lowest bits of an order that are the same in all elements of a dtype, but for their sign.
SHIFTS = {"float32": 0, "bfloat16": 16, "float16": 13}
# By rising length, for few elements to sort, for many, and for many of few rows, which more warps sort sooner (H200).
_LONG_ROWS = (Block(4096, 4, 1, 128), Block(8192, 8, 1, 256))
_ROWS = (Block(32, 1, 4), Block(64, 1), Block(256, 1), Block(1024, 1), Block(2048, 2, 1, 64), *_LONG_ROWS)
_SORTED_ROWS = (*_ROWS[:2], Block(256, 1, 1, 64), Block(1024, 1, 1, 64), *_ROWS[4:])
_FEW_ROWS = (*_SORTED_ROWS[:3], Block(1024, 4, 1, 128), Block(2048, 4, 1, 128), *_LONG_ROWS)
# Blocks that take the best out of the others, one after the other, by rising length. For up to so many elements of rows that
# are this long, and else for few, that takes less time than to sort (H200, 18 lengths): the best two of 65,536 × 64 took 14 µs
# instead of 111, ten of 65,536 × 256 174 instead of 121.
TAKEN = (
    *(Block(16, 4, 64, 0), Block(32, 4, 64, 0), Block(64, 4, 32, 0), Block(128, 4, 16, 0), Block(256, 4, 4, 0)),
    *(Block(512, 4, 4, 0), Block(1024, 4, 4, 0), Block(2048, 4, 2, 0), Block(4096, 8, 2, 0), Block(8192, 8, 2, 0)),
)
_MOST_TAKEN, _FEW_TAKEN = {32: 16, 64: 32, 128: 8, 512: 6}, 4
# Elements to sort above which these are taken, and few rows a multiprocessor.
_SORTED, _FEW_SORTED, _FEW = 32, 64, 4
_SELECT = (Block(1024, 1), Block(4096, 4), Block(8192, 8))
_GROUPS = Block(2048, 8)
_LONG = {
    16: Config(None, _GROUPS, 128, _SELECT, Block(2048, 4, 1, 128)),
    64: Config(None, _GROUPS, 64, _SELECT, Block(4096, 4, 1, 128)),
    256: Config(None, _GROUPS, 32, _SELECT, Block(8192, 8, 1, 256)),
    1024: Config(None, _GROUPS, 8, _SELECT, Block(8192, 16, 1, 512)),
}
# No more orders or keys than this holds are ranked whole, of several rows at once. ROCm's compiler would read each order that
# another is compared with by itself.
_RANKED = Block(SHORT, 1, 2)
_LONG_OF_CUDA = _LONG | {width: replace(_LONG[width], select=(_RANKED, *_SELECT)) for width in WIDTHS if width <= SHORT}
_INTERPRETED_ROWS = (Block(32, 4, 2), Block(128, 4))
_INTERPRETED_TAKEN, _INTERPRETED_FEW = (Block(32, 4, 2, 0), Block(128, 4, 2, 0)), 2
_INTERPRETED = {
    width: Config(None, Block(width * 2, 4), 2, (Block(width * 2, 4),), Block(width * 2, 4)) for width in WIDTHS
}
_INTERPRETED[16] = replace(_INTERPRETED[16], select=(Block(16, 4, 2), *_INTERPRETED[16].select))


def width_of(k: int) -> int:
    """The least of `WIDTHS` that is not below `k`."""
    return next(width for width in WIDTHS if width >= k)


def num_kept(k: int) -> int:
    """Most elements of a row that are kept to be sorted: a bound for some more than `k` is found sooner.

    Never more than take another round of merging.
    """
    return min(k + max(32, k // 8), max(SHORT, 1 << (k - 1).bit_length()))


def choose(problem: Problem, target: Target) -> Config:
    """The kernels and blocks for `problem` on `target`: one of `enumerate_configs`."""
    rows = row_blocks(problem.k, problem.rows, target)
    if target.backend == "interpreter":
        rows = _INTERPRETED_TAKEN if problem.k <= _INTERPRETED_FEW else rows
    elif is_taken(problem.num_places, problem.k):
        rows = TAKEN
    if problem.num_places <= rows[-1].block_n:
        return Config(row=block_for(problem.num_places, rows))
    return _long(target)[width_of(problem.k)]


def _long(target: Target) -> dict[int, Config]:
    """Configurations of long rows on `target`, by width."""
    return {"interpreter": _INTERPRETED, "cuda": _LONG_OF_CUDA}.get(target.backend, _LONG)


def is_taken(n: int, k: int, *, is_wide: bool = True) -> bool:
    """Whether `k` of `n` elements are taken out one after the other; `is_wide`: threads read whole pieces of a row."""
    more = next((most for length, most in _MOST_TAKEN.items() if n <= length), 0) if is_wide else 0
    return k <= max(_FEW_TAKEN, more)


def row_blocks(k: int, rows: int, target: Target) -> tuple[Block, ...]:
    """Blocks that hold a whole one of `rows` rows, of which `k` elements are sorted, by rising length."""
    if target.backend == "interpreter":
        return _INTERPRETED_ROWS
    if k > _FEW_SORTED and rows <= _FEW * target.num_sms:
        return _FEW_ROWS
    return _ROWS if k <= _SORTED else _SORTED_ROWS


def select_blocks(k: int, target: Target) -> tuple[Block, ...]:
    """Blocks that select `k` orders or keys, by rising length."""
    return _long(target)[width_of(k)].select


def block_for(n: int, blocks: tuple[Block, ...]) -> Block:
    """The smallest of `blocks` that holds `n`, or the largest."""
    return next((block for block in blocks if block.block_n >= n), blocks[-1])


def enumerate_configs(target: Target) -> Iterator[Config]:
    """Every configuration that `choose` can return on `target`."""
    kinds = ((1, 1), (MAX_K, 1), (MAX_K, 1 << 30))
    blocks = dict.fromkeys(_INTERPRETED_TAKEN if target.backend == "interpreter" else TAKEN)
    blocks |= dict.fromkeys(block for k, rows in kinds for block in row_blocks(k, rows, target))
    yield from (Config(row=block) for block in blocks)
    yield from _long(target).values()
