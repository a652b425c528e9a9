"""Blocks of the add kernel. Pure: no torch, no Triton, no device."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.tables import table_for
from kernels.targets import Target

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
DTYPES = tuple(ITEM_BYTES)
MAX_RANK = 4


@dataclass(frozen=True)
class Problem:
    """One addition as the choice of blocks sees it.

    Attributes:
        rows: product of all extents but the last, after merging.
        n: the last extent.
        dtype: name of the inputs' dtype.
        out_dtype: name of the output's dtype.
        is_aligned: whether rows can be read and written in 16-byte pieces.
        a_inner: how `a` goes along the last extent: `unit` (stride 1), `repeat` (stride 0) or `any`.
        b_inner: the same for `b`.
        out_inner: the same for the output.
        outer_rank: dimensions that number the rows: 0 for a single row, 1, or 3.
    """

    rows: int
    n: int
    dtype: str
    out_dtype: str
    is_aligned: bool = True
    a_inner: str = "unit"
    b_inner: str = "unit"
    out_inner: str = "unit"
    outer_rank: int = 0


@dataclass(frozen=True)
class Config:
    """Blocks and compiler options of one launch."""

    block_rows: int
    block_n: int
    num_warps: int


def choose(problem: Problem, target: Target) -> Config:
    """The configuration for `problem` on `target`."""
    if target.backend == "interpreter":
        return Config(1, 64, 4) if problem.n > 32 else Config(4, 16, 4)
    num_warps, vectors = _measured(problem, target)
    elements = vectors * target.warp_size * num_warps * 16 // ITEM_BYTES[problem.out_dtype]
    if problem.n >= elements:
        return Config(1, elements, num_warps)
    block_n = max(16, 1 << (problem.n - 1).bit_length())
    return Config(max(1, elements // block_n), block_n, num_warps)


def _measured(problem: Problem, target: Target) -> tuple[int, int]:
    """Warps of a program, and 16-byte pieces of each operand for a thread."""
    for entry in table_for(target).get("add", ()):
        if entry["max_n"] is None or problem.n * problem.rows <= entry["max_n"]:
            return entry["num_warps"], entry["vectors"]
    return 4, 2
