"""Operands that broadcast, as rows that an elementwise kernel walks, and the binaries of such kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.elementwise import ALL_ACROSS, ALL_EACH, Config, Inner, Problem, Specialization
from tilewire.kernels.runtime.kinds import name_of, pointer
from tilewire.kernels.runtime.launch import Variant, are_aligned
from tilewire.kernels.runtime.strides import Dims, broadcast_strides, collapse
from tilewire.kernels.runtime.targets import Target

ProblemT = TypeVar("ProblemT", bound=Problem)
MAX_RANK = 4
# Counts and offsets in 32 bits end here: before 2^31 by more than a block.
_NARROW = (1 << 31) - (1 << 16)
# Elements side by side, and those of a row, from which on a tile gains where an operand lies across rows. Where rows are
# shorter, the lines that a warp touches stay at hand for the next ones.
LINE, LONG_ROW = 16, 128


@dataclass(frozen=True)
class Walk:
    """Two operands and an output over four dimensions, padded on the outside with extents of 1.

    Attributes:
        extents: Outermost first.
        strides: Those of both operands and the output over them, 0 where an operand repeats.
    """

    extents: Dims
    strides: tuple[Dims, ...]

    @property
    def inner(self) -> Inner:
        """Steps along the last extent."""
        a, b, out = ({0: "repeat", 1: "unit"}.get(strides[3], "any") for strides in self.strides)
        return a, b, out

    def problem(self, kind: type[ProblemT], a: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor) -> ProblemT:
        """The walk as the choice of blocks sees it, a problem of the op's `kind`."""
        unit = 16 // a.element_size()
        # One element of a row that repeats is read, wherever it lies.
        pieces = [part for part in zip(self.strides, (a, b, out), strict=True) if part[0][3] != 0]
        is_aligned = all(step % unit == 0 for strides, _ in pieces for step in strides[:3])
        return kind(
            math.prod(self.extents[:3]),
            self.extents[3],
            name_of(a.dtype),
            name_of(out.dtype),
            is_aligned and are_aligned(tensor for _, tensor in pieces if tensor is not None),
            self.inner,
            3 if math.prod(self.extents[:2]) > 1 else int(self.extents[2] > 1),
            b is not None,
            0 if self.across is None else self.extents[self.across],
        )

    @property
    def across(self) -> int | None:
        """The dimension beside the last in which neighbours lie, of operands that have none in the last; None without.

        None, too, where tiles of such rows gain nothing.
        """
        if self.extents[3] < LONG_ROW:
            return None
        steps = [
            (strides[dim], dim)
            for strides in self.strides
            for dim in range(3)
            if self.extents[dim] >= LINE and 0 < strides[dim] < strides[3]
        ]
        return min(steps)[1] if steps else None

    @property
    def is_narrow(self) -> bool:
        """Whether 32 bits count the elements, and hold every offset."""
        spans = (
            sum((extent - 1) * step for extent, step in zip(self.extents, strides, strict=True))
            for strides in self.strides
        )
        return max(math.prod(self.extents), *spans) <= _NARROW

    def sizes(self, letters: str, unit: int) -> dict[str, float]:
        """Arguments of a kernel: extents, and the strides of operands and output, which its arguments name by `letters`."""
        _, extent_1, extent_2, n = self.extents
        sizes: dict[str, float] = {"rows": math.prod(self.extents[:3]), "n": n}
        sizes |= {"extent_1": extent_1, "extent_2": extent_2}
        divisors = zip(("divisor_1", "divisor_2", "divisor_n"), self.extents[1:], strict=True)
        sizes |= {name: divisor_of(extent) for name, extent in divisors}
        sizes["is_narrow"] = int(self.is_narrow)
        for letter, strides in zip(letters, self.strides, strict=True):
            sizes |= {f"stride_{letter}{dim}": strides[dim] // (unit if strides[3] else 1) for dim in range(3)}
            sizes |= {f"stride_{letter}n": strides[3]}
        return sizes


def divisor_of(divisor: int) -> int:
    """What kernels divide by `divisor` with: q = ⌊number · m / 2^(32 + shift)⌋, as 32 · m + shift.

    Exact for numbers from 0 to 2^31 - 1 and divisors up to 2^31; by 1 for 0 alone, which is all that there is to divide by an
    extent of 1. Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
    """
    log = (divisor - 1).bit_length()
    return ((1 << 31 + log) + divisor - 1) // divisor << 5 | max(0, log - 1)


def walk_of(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Walk | None:
    """How a kernel walks operands that broadcast to the shape of `out`; None where dimensions do not merge into four.

    Dimensions come in the order in which they lie in `out`, but the one in which an operand that lies across has its
    neighbours is the last but one: rows of a tile go along it.
    """
    steps = [broadcast_strides(tensor.shape, tensor.stride(), out.shape) for tensor in (a, b)]
    steps.append(tuple(out.stride()))
    order = sorted(range(out.dim()), key=out.stride, reverse=True)
    extents, strides = collapse(
        [out.shape[dim] for dim in order], *([own[dim] for dim in order] for own in steps), rank=MAX_RANK
    )
    if len(extents) > MAX_RANK:
        return None
    walk = Walk(extents, ((0, 0, 0, 1),) * 3 if out.numel() == 1 else strides)
    if walk.across in (None, 2):
        return walk
    order = [*(dim for dim in range(3) if dim != walk.across), walk.across, 3]
    return Walk(tuple(extents[dim] for dim in order), tuple(tuple(own[dim] for dim in order) for own in strides))


def programs_of(problem: Problem, specialization: Specialization, config: Config) -> int:
    """Number of programs that take one block each."""
    if specialization.inner == ALL_EACH:
        return -(-problem.rows * problem.n // config.block_n)
    if specialization.inner == ALL_ACROSS:
        rows, columns = problem.across, problem.rows * problem.n // problem.across
        return -(-rows // config.block_rows) * -(-columns // config.block_n)
    return -(-problem.rows // config.block_rows) * -(-problem.n // config.block_n)


def elementwise_binary(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    specialization: Specialization,
    config: Config,
    target: Target,
) -> Variant:
    """The binary of an elementwise kernel.

    Args:
        kernel: The `@triton.jit` function; its arguments begin with pointers to both operands and the output.
        types: Types of its arguments that are neither these nor sizes.
        constants: Values that only this kernel takes.
        specialization: All else that the binary depends on.
        config: Blocks.
        target: Device that it is compiled for.
    """
    item = pointer(specialization.dtype)
    operands = tuple(kernel.arg_names[:3])
    counts = ("rows", "n", "extent_1", "extent_2", "divisor_1", "divisor_2", "divisor_n")
    types = dict.fromkeys(counts, "i64") | types
    types |= zip(operands, (item, item, item if specialization.is_typed else "*i8"), strict=True)
    steps = [f"{name[0].upper()}_INNER" for name in operands[:2]]
    constants = constants | {
        "UNIT": specialization.unit,
        **dict(zip((*steps, "OUT_INNER"), specialization.inner, strict=True)),
        "OUTER_RANK": specialization.outer_rank,
        "IS_BINARY": specialization.is_binary,
        "IS_TYPED": specialization.is_typed,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
    }
    is_wide = [specialization.is_aligned and step != "repeat" for step in specialization.inner]
    aligned = tuple(name for name, wide in zip(operands, is_wide, strict=True) if wide)
    return binary(kernel, types, constants, config.num_warps, target, aligned)
