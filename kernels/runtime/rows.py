"""Tensors as rows along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewire.kernels.runtime.kinds import FLOATS, name_of
from tilewire.kernels.runtime.strides import collapse


def check_rows(x: torch.Tensor, axis: int) -> int:
    """Checks a tensor of floats that is walked along `axis`.

    Returns:
        The axis, counted from the front.

    Raises:
        ValueError: Rank, dtype or axis cannot be right.
    """
    if x.dim() == 0:
        raise ValueError("x: needs one dimension or more")
    check_dtype("x", x.dtype, FLOATS)
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis: {axis} is not an axis of rank {x.dim()}")
    return axis % x.dim()


def check_dtype(name: str, dtype: torch.dtype, allowed: Sequence[str]) -> None:
    """Raises `ValueError` where `dtype`, that of `name`, is not one of `allowed`."""
    if name_of(dtype) not in allowed:
        raise ValueError(f"{name}: dtype {dtype} is not one of {', '.join(allowed)}")


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


def rows_of(*tensors: torch.Tensor) -> RowsView | None:
    """Tensors (…, N) of one shape as a kernel walks them; None where dimensions beside the last do not merge into two."""
    *shape, n = tensors[0].shape
    extents, strides = collapse(shape, *(tensor.stride()[:-1] for tensor in tensors))
    if len(extents) > 2:
        return None
    missing = 2 - len(extents)
    outer, inner = (*(1,) * missing, *extents)
    steps = []
    for tensor, values in zip(tensors, strides, strict=True):
        step_outer, step_inner = (*(0,) * missing, *values)
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


def as_rows(x: torch.Tensor, axis: int) -> torch.Tensor:
    """`x` with `axis` last, copied unless `row_stride` finds its rows at one distance."""
    rows = x.movedim(axis, -1)
    return rows if row_stride(rows) is not None else rows.contiguous()
