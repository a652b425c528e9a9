"""What the choice of blocks for add and pointwise has in common. Pure: no torch, no Triton, no device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewire.kernels.runtime.kinds import unit_of
from tilewire.kernels.runtime.targets import Target

# How both operands and the output go along the last extent: `unit` (stride 1), `repeat` (stride 0) or `any`. For `each` the
# place of each element is found by itself, and there are no rows. For `across` a row is one index of the dimension in which
# an operand has its neighbours, and goes through all the others.
Inner = tuple[str, str, str]
ALL_UNIT: Inner = ("unit", "unit", "unit")
REPEATS: tuple[Inner, ...] = (("unit", "repeat", "unit"), ("repeat", "unit", "unit"))
ALL_ACROSS: Inner = ("across", "across", "across")
ALL_EACH: Inner = ("each", "each", "each")


@dataclass(frozen=True)
class Specialization:
    """All that a binary depends on besides its blocks.

    Attributes:
        dtype: Name of the inputs' dtype.
        is_typed: Whether the output has the same; else its type is passed at run time.
        is_aligned: Whether rows can be read and written in 16-byte pieces.
        inner: Steps of the operands and the output along the last extent.
        outer_rank: Dimensions that number the rows: 0 for a single row, 1, or 3.
        is_binary: Whether there are two inputs.
    """

    dtype: str
    is_typed: bool
    is_aligned: bool
    inner: Inner
    outer_rank: int
    is_binary: bool = True

    @property
    def unit(self) -> int:
        """By what the kernels multiply the strides of rows that they are given."""
        return unit_of(self.dtype, is_aligned=self.is_aligned)


@dataclass(frozen=True)
class Config:
    """Blocks and compiler options of one launch."""

    block_rows: int
    block_n: int
    num_warps: int


@dataclass(frozen=True)
class Problem:
    """One elementwise function as the choice of blocks sees it.

    Attributes:
        rows: Product of all extents but the last, after merging.
        n: Last extent.
        dtype: Name of the inputs' dtype.
        out_dtype: Name of the output's dtype.
        is_aligned: Whether rows can be read and written in 16-byte pieces.
        inner: Steps of both operands and the output along the last extent.
        outer_rank: Dimensions that number the rows: 0 for a single row, 1, or 3.
        is_binary: Whether there are two inputs.
        across: Extent of the dimension in which an operand has its neighbours, if it lies across rows as after a
            transposition, and tiles gain from that; else 0.
    """

    rows: int
    n: int
    dtype: str
    out_dtype: str
    is_aligned: bool = True
    inner: Inner = ALL_UNIT
    outer_rank: int = 0
    is_binary: bool = True
    across: int = 0

    @property
    def loose(self) -> Inner:
        """The steps of binaries that take any strides: tiles where an operand lies across rows, else `ALL_EACH`."""
        return ALL_ACROSS if self.across else ALL_EACH

    @property
    def is_short(self) -> bool:
        """Whether blocks of aligned rows would be mostly empty."""
        return self.n < _SHORTEST


# The shortest blocks of aligned rows.
_SHORTEST = 16
# Elements of a program where each has a place of its own, and up to how many a multiprocessor.
_EACH = ((2048, Config(1, 256, 2)), (math.inf, Config(1, 512, 4)))
# The tile where an operand lies across rows: of 8 the best or within 10 % of it for most of 20 operands (H200).
_ACROSS = Config(8, 128, 4)
_INTERPRETED_EACH, _INTERPRETED_ACROSS = ((math.inf, Config(1, 64, 4)),), Config(8, 32, 4)


def _loose(specialization: Specialization, target: Target) -> tuple[tuple[float, Config], ...]:
    if specialization.inner == ALL_EACH:
        return _INTERPRETED_EACH if target.backend == "interpreter" else _EACH
    return ((math.inf, _INTERPRETED_ACROSS if target.backend == "interpreter" else _ACROSS),)


def loose_configs(specialization: Specialization, target: Target) -> tuple[Config, ...]:
    """Blocks that `choose_loose` has for `ALL_EACH` or `ALL_ACROSS`."""
    return tuple(config for _, config in _loose(specialization, target))


def choose_loose(problem: Problem, specialization: Specialization, target: Target) -> Config:
    """Blocks of a problem whose binary takes any strides."""
    size = problem.rows * problem.n / target.num_sms
    return next(config for most, config in _loose(specialization, target) if size <= most)
