"""Blocks of the reduction kernels. Pure: no torch, no Triton, no device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tilewire.kernels.runtime.kinds import FLOATS, unit_of
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
        n: Elements of a row.
        dtype: Name of the input's dtype.
        state: State of the kind.
        is_row: Whether elements of a row are neighbours; else rows lie across memory.
        is_aligned: Whether 16-byte pieces can be read.
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

    @property
    def unit(self) -> int:
        """By what kernels multiply the lengths and strides that they are given."""
        return unit_of(self.dtype, is_aligned=self.is_aligned)


@dataclass(frozen=True)
class Config:
    """Blocks of one reduction.

    Attributes:
        block_rows: Rows of a program.
        block_n: Elements of a row that are read at a time.
        num_warps: Warps of a program.
        parts: Programs of a row.
        steps: Blocks of elements of a program.
    """

    block_rows: int
    block_n: int
    num_warps: int
    parts: int = 1
    steps: int = 1


MAX_PARTS = 512
# Warps of the programs that share rows, a multiprocessor (H200, `tilewire bench ops --random`).
_ROW_WARPS, _COLUMN_WARPS = 64, 16
# Blocks of a row that one program takes, since parts cost more.
_ALONE = 4
# By rising number of elements: blocks by rising number of rows, up to so many a multiprocessor. Programs start at a rate
# that many small ones do not reach; few large ones leave multiprocessors idle.
_ROWS: tuple[tuple[float, tuple[tuple[float, Config], ...]], ...] = (
    (4, ((math.inf, Config(512, 4, 4)),)),
    (16, ((math.inf, Config(128, 16, 4)),)),
    (32, ((math.inf, Config(64, 32, 4)),)),
    (64, ((128, Config(8, 64, 1)), (math.inf, Config(32, 64, 4)))),
    (128, ((32, Config(4, 128, 1)), (math.inf, Config(8, 128, 2)))),
    (256, ((24, Config(2, 256, 1)), (math.inf, Config(8, 256, 4)))),
    (512, ((8, Config(1, 512, 1)), (math.inf, Config(4, 256, 4)))),
    (1024, ((2, Config(1, 512, 1)), (32, Config(2, 1024, 4)), (math.inf, Config(4, 256, 4)))),
    (2048, ((2, Config(1, 512, 1)), (8, Config(1, 2048, 4)), (math.inf, Config(2, 512, 2)))),
    (math.inf, ((8, Config(1, 4096, 8)), (math.inf, Config(1, 1024, 4)))),
)
# Columns by falling width of a block, with the number of blocks a multiprocessor that it is taken for, and the number of
# elements below which so much fewer blocks are enough.
_COLUMNS = (
    (1.2, 1, Config(1024, 4, 4)),
    (8, 256, Config(256, 16, 4)),
    (0.15, 1, Config(64, 64, 4)),
    (0, 1, Config(16, 256, 8)),
)
# For columns of few elements, where all are fewer than so many wide blocks a multiprocessor.
_SHORT, _FEW_N, _FEW_BLOCKS = Config(256, 4, 4), 8, 4
# For few neighbouring columns.
_NARROW, _FEW_INNER = Config(2, 512, 4), 8
_INTERPRETED_ROWS = (Config(2, 16, 4), Config(1, 32, 4))
_INTERPRETED_COLUMNS = (Config(16, 16, 4),)


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its kind, and with parts and steps, one of `enumerate_configs`."""
    if target.backend == "interpreter":
        found = configs_for(target, is_row=problem.is_row)
        return share(problem, next((config for config in found if config.block_n >= problem.n), found[-1]), target)
    if problem.is_row:
        blocks = next(blocks for most, blocks in _ROWS if problem.n <= most)
        config = next(config for most, config in blocks if problem.rows <= most * target.num_sms)
    elif problem.rows_inner <= _FEW_INNER:
        config = _NARROW
    elif problem.n <= _FEW_N and problem.rows < _FEW_BLOCKS * _COLUMNS[0][2].block_rows * target.num_sms:
        config = _SHORT
    else:
        config = next(
            config
            for least, n, config in _COLUMNS
            if _num_tiles(problem, config) >= least * min(1.0, problem.n / n) * target.num_sms
            and 2 * problem.rows_inner > config.block_rows
        )
    return share(problem, config, target)


def _num_tiles(problem: Problem, config: Config) -> int:
    """Programs, where none share rows."""
    outer, inner = (1, problem.rows) if problem.is_row else (problem.rows // problem.rows_inner, problem.rows_inner)
    return max(1, outer * -(-inner // config.block_rows))


def share(problem: Problem, config: Config, target: Target) -> Config:
    """`config` with a row shared by as many programs as fill the device."""
    blocks = max(1, -(-problem.n // config.block_n))
    warps = _ROW_WARPS if problem.is_row else _COLUMN_WARPS
    tiles = _num_tiles(problem, config)
    parts = max(1, min(warps // config.num_warps * target.num_sms // tiles, MAX_PARTS))
    is_alone = blocks <= _ALONE or (tiles >= target.num_sms and not problem.is_row)
    steps = blocks if is_alone else -(-blocks // parts)
    return Config(config.block_rows, config.block_n, config.num_warps, -(-blocks // steps), steps)


def configs_for(target: Target, *, is_row: bool) -> tuple[Config, ...]:
    """Blocks that `choose` has for rows, or for columns."""
    if target.backend == "interpreter":
        return _INTERPRETED_ROWS if is_row else _INTERPRETED_COLUMNS
    if is_row:
        return tuple(dict.fromkeys(config for _, blocks in _ROWS for _, config in blocks))
    return (*(config for _, _, config in _COLUMNS), _NARROW, _SHORT)


def enumerate_configs(target: Target) -> Iterator[tuple[Problem, Config]]:
    """Every kind of problem and blocks that `choose` can return on `target`."""
    for dtype in FLOATS:
        for state in STATES:
            problems = [Problem(1, 1, 1, dtype, state, is_aligned=aligned) for aligned in (True, False)]
            for aligned, unit in ((True, True), (False, True), (False, False)):
                problems.append(Problem(1, 1, 1, dtype, state, False, aligned, unit))
            for problem in problems:
                yield from ((problem, config) for config in configs_for(target, is_row=problem.is_row))
