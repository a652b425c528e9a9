"""Tensors as rows along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewire.kernels.runtime.kinds import FLOATS, name_of
from tilewire.kernels.runtime.strides import collapse

# Most rows of an operand, and most elements along an axis: kernels count both in 32 bits, past the end up to that of the last
# block. Elementwise kernels count in 64.
MAX_COUNT = 1 << 30


def check_rows(x: torch.Tensor, axis: int) -> int:
    """Checks a tensor of floats that is walked along `axis`.

    Returns:
        The axis, counted from the front.

    Raises:
        ValueError: Rank, dtype or axis cannot be right, or there are too many rows or elements along the axis.
    """
    if x.dim() == 0:
        raise ValueError("x: needs one dimension or more")
    check_dtype("x", x.dtype, FLOATS)
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis: {axis} is not an axis of rank {x.dim()}")
    if x.numel():
        check_counts("x", elements=x.shape[axis], rows=x.numel() // x.shape[axis])
    return axis % x.dim()


def check_counts(name: str, **counts: int) -> None:
    """Raises `ValueError` where there are too many rows or elements of `name`; `counts` has them by a word for each."""
    for counted, count in counts.items():
        if count > MAX_COUNT:
            raise ValueError(f"{name}: expected at most {MAX_COUNT} {counted}, got {count}")


def check_dtype(name: str, dtype: torch.dtype, allowed: Sequence[str]) -> None:
    """Raises `ValueError` where `dtype`, that of `name`, is not one of `allowed`."""
    if name_of(dtype) not in allowed:
        raise ValueError(f"{name}: dtype {dtype} is not one of {', '.join(allowed)}")


def check_pair(names: str, first: torch.Tensor, second: torch.Tensor) -> None:
    """Raises `ValueError` where two operands, called `names`, differ in dtype or device."""
    if first.dtype != second.dtype or first.device != second.device:
        found = f"{first.dtype} on {first.device} and {second.dtype} on {second.device}"
        raise ValueError(f"{names}: expected one dtype and device, got {found}")


def output(out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns `out`, or a new tensor where it is None; raises `ValueError` where it is not of this shape and dtype."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if out.shape != torch.Size(shape) or out.dtype != dtype or out.device != device:
        raise ValueError(f"out: expected {tuple(shape)} of {dtype} on {device}, got {tuple(out.shape)} of {out.dtype}")
    return out


@dataclass(frozen=True)
class RowsView:
    """Tensors of one shape as rows numbered over two dimensions.

    Attributes:
        rows: Extents of the two dimensions, (outer, inner).
        n: Elements of a row.
        strides: Those of each tensor: (outer, inner, n).
    """

    rows: tuple[int, int]
    n: int
    strides: tuple[tuple[int, int, int], ...]

    def sizes(self, unit: int) -> dict[str, int]:
        """Arguments of a kernel for an input and an output: lengths and strides in units of so many elements."""
        found = {"rows": self.rows[0] * self.rows[1], "rows_inner": self.rows[1], "n": self.n // unit}
        for letter, strides in zip("xo", self.strides, strict=True):
            found |= {f"stride_{letter}{dim}": stride // unit for dim, stride in zip("oin", strides, strict=True)}
        return found

    def sizes_across(self, unit: int) -> dict[str, int]:
        """The same for rows side by side, of which `unit` are read at once: numbers of rows and strides in units of them."""
        found = self.sizes(1)
        apart = ("rows", "rows_inner", *(f"stride_{letter}{dim}" for letter in "xo" for dim in "on"))
        return found | {name: found[name] // unit for name in apart}


def rows_of(*tensors: torch.Tensor) -> RowsView | None:
    """Tensors (…, N) of one shape as a kernel walks them; None where dimensions beside the last do not merge into two."""
    *shape, n = tensors[0].shape
    extents, strides = collapse(shape, *(tensor.stride()[:-1] for tensor in tensors), rank=2)
    if len(extents) > 2:
        return None
    outer, inner = extents
    steps = []
    for tensor, (step_outer, step_inner) in zip(tensors, strides, strict=True):
        steps.append((step_outer, step_inner, 1 if n == 1 else tensor.stride(-1)))
    return RowsView((outer, inner), n, tuple(steps))


def row_stride(x: torch.Tensor) -> int | None:
    """Elements from one row to the next where `x` (…, N) is rows of neighbours at one distance; else None."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    extents, (strides,) = collapse(x.shape[:-1], x.stride()[:-1])
    if len(extents) > 1:
        return None
    return strides[0] if strides else x.shape[-1]
