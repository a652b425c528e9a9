"""Blocks of the reduction kernels. Pure: no torch, no Triton, no device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES, unit_of
from tilewire.kernels.runtime.targets import Target

# Types of the output, by the number that kernels are given.
OUT_KINDS = {"float16": 1, "bfloat16": 2, "float32": 3, "int64": 4}


@dataclass(frozen=True)
class Kind:
    """Parts of one kind of reduction.

    Attributes:
        state: State that kernels keep: 0 a sum, 1 an order with an index, 2 a maximum with a sum, 3 an order.
        number: Final function of the state, as the kernels number it.
        flip: -1 where the smallest is best.
        power: 2 for sums of squares.
        has_empty: Whether it is defined for no element.
    """

    state: int
    number: int
    flip: int = 0
    power: int = 1
    has_empty: bool = True

    @property
    def is_index(self) -> bool:
        """Whether the result is an index."""
        return self.number == _INDEX


_INDEX = 4
KINDS = {
    "sum": Kind(0, 0),
    "mean": Kind(0, 1),
    "norm": Kind(0, 2, power=2),
    "max": Kind(3, 3, has_empty=False),
    "min": Kind(3, 3, flip=-1, has_empty=False),
    "argmax": Kind(1, _INDEX, has_empty=False),
    "argmin": Kind(1, _INDEX, flip=-1, has_empty=False),
    "logsumexp": Kind(2, 5),
}
STATES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Problem:
    """One reduction as the choice of blocks sees it.

    Attributes:
        rows: Number of results.
        rows_inner: Extent of the innermost dimension beside the axis, after merging.
        n: Elements of a row; of one that may begin in the middle of a piece, so many more as may lie around it.
        dtype: Name of the input's dtype.
        state: State of the kind.
        is_row: Whether elements of a row are neighbours; else rows lie across memory.
        is_aligned: Whether 16-byte pieces are read.
        is_cut: Whether pieces of a row may hold what is not of it.
        is_unit_inner: Whether neighbouring rows are neighbours in memory, where they lie across it.
    """

    rows: int
    rows_inner: int
    n: int
    dtype: str
    state: int
    is_row: bool = True
    is_aligned: bool = True
    is_unit_inner: bool = True
    is_cut: bool = False

    @property
    def unit(self) -> int:
        """Elements that are read at a time; of columns also by what the kernel multiplies its lengths and strides."""
        return unit_of(self.dtype, is_aligned=self.is_aligned)


@dataclass(frozen=True)
class Config:
    """Blocks of one reduction.

    Attributes:
        block_rows: Rows of a program.
        block_n: Elements of a row that are read at a time.
        num_warps: Warps of a program.
        parts: Programs of a row, which take its blocks in turn.
    """

    block_rows: int
    block_n: int
    num_warps: int
    parts: int = 1


MAX_PARTS = 2048
# Warps of the programs that share rows, a multiprocessor (H200, `tilewire bench ops --random`).
_ROW_WARPS, _COLUMN_WARPS = 64, 16
# Blocks of a row that one program takes, and blocks of columns a multiprocessor that are not shared, since parts cost more.
_ALONE, _COLUMN_TILES = 4, 2
# Rows by rising number of elements, and long rows where they are few, up to so many a multiprocessor (H200). Where pieces
# hold what is not of a row, short ones are read element by element.
_SHORT = ((4, Config(512, 4, 4)), (8, Config(256, 8, 4)), (16, Config(128, 16, 4)), (32, Config(64, 32, 4)))
SHORT = 32
# Short rows where they are few, up to so many a multiprocessor, by rising number of elements: of any state, and of a best
# element, whose programs do more.
_FEW_SHORT_ROWS = 300
_FEW_SHORT: dict[float, Config] = {8: Config(64, 8, 4)}
_FEW_SHORT_BEST: dict[float, Config] = {16: Config(32, 16, 4), 32: Config(16, 32, 4)}
_BEST = 1
# Many rows of 16 bits of this length, from so many a multiprocessor on.
_MANY_MIDDLE, _MANY_MIDDLE_N, _MANY_MIDDLE_ROWS = Config(4, 1024, 4), (1024, 2048), 40
_ROWS = (
    *_SHORT,
    (64, Config(32, 64, 4)),
    (128, Config(16, 128, 4)),
    (256, Config(8, 256, 4)),
    (512, Config(8, 512, 4)),
    (1024, Config(4, 1024, 4)),
    (2048, Config(1, 2048, 4)),
    (math.inf, Config(1, 4096, 4)),
)
_CUT = ((800, Config(16, 128, 4)), (3000, Config(4, 1024, 4)), (math.inf, Config(1, 2048, 4)))
_FEW_LONG, _FEW_LONG_ROWS = Config(1, 4096, 8), 4
# Columns (H200, 75 shapes in all of 14 blocks, and 36 in four): of few elements, with the rows a multiprocessor from which
# up to so many elements are few; of many rows; of others; of few rows; of few neighbours.
_FLAT, _FEW_N, _FLAT_ROWS, _FLAT_N = Config(1024, 4, 4), 16, 1200, 100
_MANY, _MANY_ROWS = Config(128, 32, 4), 700
_SOME, _SOME_ROWS = Config(64, 64, 4), 1
_FEW = Config(16, 256, 8)
_NARROW, _NARROW_INNER, _NARROW_N = Config(2, 512, 4), 8, 1024
_INTERPRETED_ROWS = (Config(2, 16, 4), Config(1, 32, 4))
_INTERPRETED_COLUMNS = (Config(16, 16, 4),)


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its kind, and with parts, one of `enumerate_configs`."""
    if target.backend == "interpreter":
        found = configs_for(problem, target)
        return share(problem, next((config for config in found if config.block_n >= problem.n), found[-1]), target)
    if problem.is_row:
        config = _choose_rows(problem, problem.rows / target.num_sms)
    else:
        config = _choose_columns(problem, problem.rows / target.num_sms)
    return share(problem, config, target)


def choose_invariant(problem: Problem, target: Target) -> Config:
    """Blocks that do not depend on the number of rows: a row has the same bits among any others."""
    return choose(replace(problem, rows=target.num_sms), target)


def _choose_rows(problem: Problem, rows_per_sm: float) -> Config:
    if problem.n > _FEW_LONG.block_n // 2 and rows_per_sm <= _FEW_LONG_ROWS:
        return _FEW_LONG
    longest, config = next(found for found in _rows(problem) if problem.n <= found[0])
    few = _few_short(problem)
    if longest in few and rows_per_sm <= _FEW_SHORT_ROWS:
        return few[longest]
    least, most = _MANY_MIDDLE_N
    if ITEM_BYTES[problem.dtype] == 2 and least < problem.n <= most and rows_per_sm >= _MANY_MIDDLE_ROWS:
        return _MANY_MIDDLE
    return config


def _choose_columns(problem: Problem, rows_per_sm: float) -> Config:
    if problem.rows_inner <= _NARROW_INNER and problem.n >= _NARROW_N:
        return _NARROW
    if problem.n <= _FEW_N or (problem.n <= _FLAT_N and rows_per_sm >= _FLAT_ROWS):
        return _FLAT
    if rows_per_sm >= _MANY_ROWS:
        return _MANY
    return _SOME if rows_per_sm >= _SOME_ROWS else _FEW


def share(problem: Problem, config: Config, target: Target) -> Config:
    """`config` with a row shared by as many programs as fill the device."""
    blocks = max(1, -(-problem.n // config.block_n))
    warps = _ROW_WARPS if problem.is_row else _COLUMN_WARPS
    # Programs, where none share rows.
    tiles = max(1, -(-problem.rows // config.block_rows))
    if blocks <= _ALONE or (tiles >= _COLUMN_TILES * target.num_sms and not problem.is_row):
        return config
    return replace(config, parts=max(1, min(warps // config.num_warps * target.num_sms // tiles, blocks, MAX_PARTS)))


def _rows(problem: Problem) -> list[tuple[float, Config]]:
    """Blocks of rows by rising number of elements. A block is no shorter than a piece."""
    found = _CUT if problem.is_cut else _ROWS if problem.is_aligned else _SHORT
    return [(most, config) for most, config in found if config.block_n >= problem.unit]


def _few_short(problem: Problem) -> dict[float, Config]:
    """Blocks of few short rows by the number of elements that those of many hold."""
    few = _FEW_SHORT | (_FEW_SHORT_BEST if problem.state == _BEST else {})
    return {most: few[most] for most, _ in _rows(problem) if most in few}


def configs_for(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Blocks that `choose` has for rows, or for columns."""
    if target.backend == "interpreter":
        return _INTERPRETED_ROWS if problem.is_row else _INTERPRETED_COLUMNS
    if not problem.is_row:
        return (_FLAT, _MANY, _SOME, _FEW, _NARROW)
    rows = (config for _, config in _rows(problem))
    return (*rows, *_few_short(problem).values(), *((_FEW_LONG,) if problem.is_aligned else ()))


def enumerate_configs(target: Target) -> Iterator[tuple[Problem, Config]]:
    """Every kind of problem and blocks that `choose` can return on `target`."""
    for dtype in FLOATS:
        for state in STATES:
            problems = [Problem(1, 1, 1, dtype, state, is_aligned=aligned) for aligned in (True, False)]
            problems.append(Problem(1, 1, 1, dtype, state, is_cut=True))
            for aligned, unit in ((True, True), (False, True), (False, False)):
                problems.append(Problem(1, 1, 1, dtype, state, False, aligned, unit))
            for problem in problems:
                yield from ((problem, config) for config in configs_for(problem, target))
