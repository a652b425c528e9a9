"""Which softmax kernel runs, with which blocks. Pure: no torch, no Triton, no device.

By the length of a row: short rows share a program, middling ones are held whole in registers, long ones are read twice,
and when rows are too few to occupy the device each is split over programs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.targets import Target

DTYPES = ("float16", "bfloat16", "float32")
# How many parts of one row the merging kernel holds.
MAX_SPLITS = 512


@dataclass(frozen=True)
class Problem:
    """One softmax as the choice of a kernel sees it.

    Attributes:
        rows: independent rows.
        n: elements of a row.
        dtype: name of the input's dtype.
        out_dtype: name of the output's dtype.
        is_contiguous: whether elements of a row follow one another, in input and output.
        is_aligned: whether rows can be read and written in 16-byte pieces.
    """

    rows: int
    n: int
    dtype: str
    out_dtype: str
    is_contiguous: bool = True
    is_aligned: bool = True


@dataclass(frozen=True)
class Config:
    """Blocks and compiler options of one launch.

    Attributes:
        kernel: `row` (whole rows in registers), `loop` (a row read twice), `split` (a row over several programs) or
            `column` (rows lie across memory).
        block_rows: rows of one program.
        block_n: elements of a row held at a time.
        num_warps: warps of one program.
        splits: programs of one row, for `split`.
    """

    kernel: str
    block_rows: int
    block_n: int
    num_warps: int
    splits: int = 1


def choose(problem: Problem, target: Target) -> Config:
    """The configuration for `problem` on `target`."""
    if target.backend == "interpreter":
        return _choose_interpreted(problem)
    if not problem.is_contiguous:
        return Config("column", 32, 32, 4)
    block_n = power_of_two(problem.n)
    if problem.n > 16384:
        splits = _splits(problem, target)
        return Config("split", 1, 4096, 8, splits) if splits > 1 else Config("loop", 1, 4096, 8)
    if block_n <= 512:
        return Config("row", max(1, 2048 // block_n), block_n, 4)
    return Config("row", 1, block_n, min(16, max(4, block_n // 1024)))


def power_of_two(amount: int) -> int:
    """The smallest power of two that is at least `amount`, and at least 16."""
    return max(16, 1 << (amount - 1).bit_length())


def _choose_interpreted(problem: Problem) -> Config:
    if not problem.is_contiguous:
        return Config("column", 16, 16, 4)
    if problem.n <= 64:
        return Config("row", 2, power_of_two(problem.n), 4)
    return Config("split", 1, 32, 4, 3) if problem.rows == 1 else Config("loop", 1, 32, 4)


def _splits(problem: Problem, target: Target) -> int:
    """Programs for each row such that all rows fill the device, no program with less than one block."""
    if problem.rows >= target.num_sms:
        return 1
    wanted = max(1, 2 * target.num_sms // max(1, problem.rows))
    return min(wanted, -(-problem.n // 4096), MAX_SPLITS)
