"""Operands that broadcast, as rows that an elementwise kernel walks, and the binaries of such kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.elementwise import Config, Inner, Problem, Specialization
from tilewire.kernels.runtime.kinds import name_of, pointer
from tilewire.kernels.runtime.launch import Variant, are_aligned
from tilewire.kernels.runtime.strides import Dims, broadcast_strides, collapse
from tilewire.kernels.runtime.targets import Target

ProblemT = TypeVar("ProblemT", bound=Problem)
MAX_RANK = 4


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
        is_aligned = all(step % unit == 0 for strides in self.strides for step in strides[:3])
        return kind(
            math.prod(self.extents[:3]),
            self.extents[3],
            name_of(a.dtype),
            name_of(out.dtype),
            is_aligned and are_aligned((a, b, out)),
            self.inner,
            3 if math.prod(self.extents[:2]) > 1 else int(self.extents[2] > 1),
            b is not None,
        )

    def sizes(self, letters: str, unit: int) -> dict[str, float]:
        """Arguments of a kernel: extents, and the strides of operands and output, which its arguments name by `letters`."""
        _, extent_1, extent_2, n = self.extents
        sizes: dict[str, float] = {"rows": math.prod(self.extents[:3]), "n": n}
        sizes |= {"extent_1": extent_1, "extent_2": extent_2}
        for letter, strides in zip(letters, self.strides, strict=True):
            sizes |= {f"stride_{letter}{dim}": strides[dim] // unit for dim in range(3)}
            sizes |= {f"stride_{letter}n": strides[3]}
        return sizes


def walk_of(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Walk | None:
    """How a kernel walks operands that broadcast to the shape of `out`; None where dimensions do not merge into four."""
    shape = tuple(out.shape)
    operands = [broadcast_strides(tensor.shape, tensor.stride(), shape) for tensor in (a, b)]
    extents, strides = collapse(shape, *operands, out.stride(), rank=MAX_RANK)
    if len(extents) > MAX_RANK:
        return None
    return Walk(extents, ((0, 0, 0, 1),) * 3 if out.numel() == 1 else strides)


def programs_of(problem: Problem, config: Config) -> int:
    """Number of programs that take one block each."""
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
    types = dict.fromkeys(("rows", "n", "extent_1", "extent_2"), "i64") | types
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
    aligned = operands if specialization.is_aligned else ()
    return binary(kernel, types, constants, config.num_warps, target, aligned)
