"""Blocks of the reduction kernels. Pure: no torch, no Triton, no device."""

from __future__ import annotations

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
# Programs that fill a multiprocessor (H200, `tilewire bench ops --random`).
_FILLING = 8
# Up to so many rows a multiprocessor, each has a program of its own.
_FEW_ROWS = 4
# Up to so many neighbouring rows, programs take two.
_FEW_INNER = 8
# Blocks of a row that one program takes, since parts cost more.
_ALONE = 4
_ROWS = (
    Config(128, 16, 4),
    Config(32, 64, 4),
    Config(16, 128, 4),
    Config(8, 256, 4),
    Config(2, 1024, 4),
    Config(1, 1024, 4),
    Config(1, 4096, 8),
    Config(1, 2048, 8),
)
# By rising number of elements, then by rising number of neighbouring rows.
_SHORT_COLUMNS = (Config(1024, 1, 4), Config(512, 4, 4))
_COLUMNS = (Config(2, 512, 4), Config(16, 128, 4), Config(32, 64, 4), Config(64, 32, 4), Config(128, 16, 4))
_INTERPRETED_ROWS = (Config(2, 16, 4), Config(1, 32, 4))
_INTERPRETED_COLUMNS = (Config(16, 16, 4),)


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its kind, and with parts and steps, one of `enumerate_configs`."""
    found = configs_for(target, is_row=problem.is_row)
    if problem.is_row:
        has_few = problem.rows <= _FEW_ROWS * target.num_sms
        found = tuple(config for config in found if config.block_rows == 1 or not has_few) or found
        fitting = [config for config in found if config.block_n >= problem.n]
    else:
        short = [config for config in found if config in _SHORT_COLUMNS]
        others = [config for config in found if config not in short]
        fitting = [config for config in short if config.block_n >= problem.n]
        fitting += [config for config in others if max(config.block_rows, _FEW_INNER) >= problem.rows_inner]
    return share(problem, (fitting or found[-1:])[0], target)


def share(problem: Problem, config: Config, target: Target) -> Config:
    """`config` with a row shared by as many programs as fill the device."""
    blocks = max(1, -(-problem.n // config.block_n))
    outer, inner = (1, problem.rows) if problem.is_row else (problem.rows // problem.rows_inner, problem.rows_inner)
    programs = max(1, outer * -(-inner // config.block_rows))
    parts = max(1, min(_FILLING * target.num_sms // programs, MAX_PARTS))
    steps = blocks if blocks <= _ALONE else -(-blocks // parts)
    return Config(config.block_rows, config.block_n, config.num_warps, -(-blocks // steps), steps)


def configs_for(target: Target, *, is_row: bool) -> tuple[Config, ...]:
    """Blocks that `choose` has for rows, or for columns."""
    if target.backend == "interpreter":
        return _INTERPRETED_ROWS if is_row else _INTERPRETED_COLUMNS
    return _ROWS if is_row else (*_SHORT_COLUMNS, *_COLUMNS)


def enumerate_configs(target: Target) -> Iterator[tuple[Problem, Config]]:
    """Every kind of problem and blocks that `choose` can return on `target`."""
    for dtype in FLOATS:
        for state in STATES:
            problems = [Problem(1, 1, 1, dtype, state, is_aligned=aligned) for aligned in (True, False)]
            for aligned, unit in ((True, True), (False, True), (False, False)):
                problems.append(Problem(1, 1, 1, dtype, state, False, aligned, unit))
            for problem in problems:
                yield from ((problem, config) for config in configs_for(target, is_row=problem.is_row))
