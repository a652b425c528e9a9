"""What the choice of blocks for add and pointwise has in common. Pure: no torch, no Triton, no device."""

from __future__ import annotations

from dataclasses import dataclass

from tilewire.kernels.runtime.kinds import unit_of

# How both operands and the output go along the last extent: `unit` (stride 1), `repeat` (stride 0) or `any`.
Inner = tuple[str, str, str]
ALL_UNIT: Inner = ("unit", "unit", "unit")
REPEATS: tuple[Inner, ...] = (("unit", "repeat", "unit"), ("repeat", "unit", "unit"))
ALL_ANY: Inner = ("any", "any", "any")


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
    """

    rows: int
    n: int
    dtype: str
    out_dtype: str
    is_aligned: bool = True
    inner: Inner = ALL_UNIT
    outer_rank: int = 0
    is_binary: bool = True
