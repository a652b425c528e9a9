"""Blocks of the add kernel. Pure: no torch, no Triton, no device."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilewire.kernels.runtime import elementwise
from tilewire.kernels.runtime.elementwise import ALL_ANY, ALL_UNIT, REPEATS, Config, Specialization
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import table_for

# Up to here rows that are read element by element get a program each.
FEW_ROWS_PER_SM = 16
# How an output type that differs from the inputs' is passed to the kernel.
KINDS = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4, "int32": 5, "int64": 6}
DTYPES = tuple(KINDS)


class Problem(elementwise.Problem):
    """One addition as the choice of blocks sees it."""

    @property
    def specialization(self) -> Specialization:
        """The specialization whose binaries compute this."""
        is_typed = self.dtype == self.out_dtype
        is_unit = self.inner == ALL_UNIT
        # Rarer patterns have fewer binaries.
        is_common = is_unit or (self.inner in REPEATS and self.is_aligned and is_typed)
        rank = self.outer_rank if is_unit and is_typed and (self.is_aligned or self.outer_rank == 0) else 3
        inner = self.inner if is_common else ALL_ANY
        return Specialization(self.dtype, is_typed, self.is_aligned and is_common, inner, rank)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration for `problem` on `target`: with its specialization, one of `members(target)`."""
    configs = configs_for(problem.specialization, target)
    if problem.specialization.outer_rank == 0:
        entries = _measured(target)
        return next(config for config, entry in zip(configs, entries, strict=True) if problem.n <= entry[0])
    if problem.specialization.is_aligned:
        # Whole blocks move without a mask: the longest that a row fills. Few rows have programs to spare.
        filled = [config for config in configs if config.block_n <= problem.n]
        return configs[-1] if problem.rows <= target.num_sms or not filled else filled[-1]
    if problem.rows <= FEW_ROWS_PER_SM * target.num_sms:
        # Element by element, a block of many short rows is a long chain for each thread; few rows have programs to spare.
        return configs[-1]
    return next((config for config in configs if config.block_n >= problem.n), configs[-1])


def members(target: Target) -> Iterator[tuple[Specialization, Config]]:
    """Every specialization and configuration that `choose` can ask for on `target`."""
    for dtype in DTYPES:
        specializations = [Specialization(dtype, True, True, ALL_UNIT, rank) for rank in (0, 1, 3)]
        specializations += [Specialization(dtype, True, True, inner, 3) for inner in REPEATS]
        specializations += [Specialization(dtype, True, False, ALL_UNIT, rank) for rank in (0, 3)]
        specializations += [Specialization(dtype, False, is_aligned, ALL_UNIT, 3) for is_aligned in (True, False)]
        specializations += [Specialization(dtype, is_typed, False, ALL_ANY, 3) for is_typed in (True, False)]
        for specialization in specializations:
            yield from ((specialization, config) for config in configs_for(specialization, target))


def configs_for(specialization: Specialization, target: Target) -> list[Config]:
    """For a single row one for each measured size; else by rising length of a row."""
    if target.backend == "interpreter":
        if specialization.outer_rank == 0:
            return [Config(1, 64, 4) for _ in _measured(target)]
        return [Config(4, 16, 4), Config(1, 64, 4)]
    threads = [(target.warp_size * num_warps, vectors, num_warps) for _, num_warps, vectors in _measured(target)]
    sizes = [
        (count * vectors * 16 // ITEM_BYTES[specialization.dtype], num_warps) for count, vectors, num_warps in threads
    ]
    if specialization.outer_rank == 0:
        return [Config(1, elements, num_warps) for elements, num_warps in sizes]
    elements, num_warps = sizes[len(sizes) // 2]
    is_common = specialization.outer_rank == 1
    lengths = [length for length in _LENGTHS if length < elements and (is_common or length in _FEWER_LENGTHS)]
    return [Config(elements // length, length, num_warps) for length in (*lengths, elements)]


# Rows that are shorter than a block share one: blocks come in these lengths.
_LENGTHS = tuple(1 << power for power in range(4, 12))
_FEWER_LENGTHS = _LENGTHS[::2]


def _measured(target: Target) -> list[tuple[float, int, int]]:
    """Most elements, warps of a program, and 16-byte pieces of each operand for a thread; by rising size."""
    table = table_for(target).get("add") or [{"max_n": None, "num_warps": 4, "vectors": 2}]
    return [(entry["max_n"] or math.inf, entry["num_warps"], entry["vectors"]) for entry in table]
