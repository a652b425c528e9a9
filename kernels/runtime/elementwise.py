"""What add and pointwise have in common: operands that broadcast, as rows that a kernel walks, and their binaries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import pointer, unit_of
from tilewire.kernels.runtime.launch import Variant, are_aligned
from tilewire.kernels.runtime.strides import Dims, broadcast_strides, collapse
from tilewire.kernels.runtime.targets import Target

MAX_RANK = 4
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
class Walk:
    """Two operands and an output over four dimensions, padded on the outside with extents of 1.

    Attributes:
        extents: Outermost first.
        strides: Those of both operands and the output over them, 0 where an operand repeats.
    """

    extents: Dims
    strides: tuple[Dims, ...]

    @property
    def rows(self) -> int:
        """Product of all extents but the last."""
        return math.prod(self.extents[:3])

    @property
    def inner(self) -> Inner:
        """Steps along the last extent."""
        a, b, out = ({0: "repeat", 1: "unit"}.get(strides[3], "any") for strides in self.strides)
        return a, b, out

    @property
    def outer_rank(self) -> int:
        """Dimensions that number the rows: 0, 1 or 3."""
        return 3 if math.prod(self.extents[:2]) > 1 else int(self.extents[2] > 1)

    def is_aligned(self, *tensors: torch.Tensor | None) -> bool:
        """Whether rows of `tensors`, those of the walk, start at multiples of 16 bytes."""
        unit = next(16 // tensor.element_size() for tensor in tensors if tensor is not None)
        return are_aligned(tensors) and all(step % unit == 0 for strides in self.strides for step in strides[:3])

    def programs(self, config: Config) -> int:
        """Number of programs that take one block each."""
        return -(-self.rows // config.block_rows) * -(-self.extents[3] // config.block_n)

    def sizes(self, letters: str, unit: int) -> dict[str, float]:
        """Arguments of a kernel: extents, and the strides of operands and output, which its arguments name by `letters`."""
        sizes: dict[str, float] = {"rows": self.rows, "n": self.extents[3]}
        sizes |= {"extent_1": self.extents[1], "extent_2": self.extents[2]}
        for letter, strides in zip(letters, self.strides, strict=True):
            sizes |= {f"stride_{letter}{dim}": strides[dim] // unit for dim in range(3)}
            sizes |= {f"stride_{letter}n": strides[3]}
        return sizes


def walk_of(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Walk | None:
    """How a kernel walks operands that broadcast to the shape of `out`; None where dimensions do not merge into four."""
    shape = tuple(out.shape)
    operands = [broadcast_strides(tensor.shape, tensor.stride(), shape) for tensor in (a, b)]
    extents, strides = collapse(shape, *operands, out.stride())
    if len(extents) > MAX_RANK:
        return None
    if not extents:
        return Walk((1,) * MAX_RANK, ((0, 0, 0, 1),) * 3)
    missing = MAX_RANK - len(extents)
    return Walk((*(1,) * missing, *extents), tuple((*(0,) * missing, *values) for values in strides))


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
