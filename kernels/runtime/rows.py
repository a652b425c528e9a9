"""Tensors as rows along one axis."""

from __future__ import annotations

import torch

from tilewire.kernels.runtime.strides import collapse


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
