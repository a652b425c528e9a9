"""Tensors for self-tests and benchmarks: whole numbers whose sums are exact, random values, and how they lie. Imports no op."""

from __future__ import annotations

import torch

from tilewire.kernels.runtime.elementwise import ALL_EACH, Config, Specialization
from tilewire.kernels.runtime.strides import Extent
from tilewire.kernels.runtime.walks import LINE, LONG_ROW


def numbers(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Whole numbers from -6 to 6, no two neighbours alike."""
    steps = (3, 5, 2, 7)
    total = torch.zeros(shape, device=device)
    for dim, step in zip(range(len(shape)), steps, strict=False):
        index = torch.arange(shape[-1 - dim], device=device) * step
        total = total + index.reshape(-1, *(1,) * dim)
    return total % 13 - 6


def lay(values: torch.Tensor, contiguous: str, dtype: torch.dtype, *, is_aligned: bool) -> torch.Tensor:
    """A copy of `values` in the memory layout that `like` gives."""
    return like(values, contiguous, dtype, is_aligned=is_aligned).copy_(values)


def like(values: torch.Tensor, contiguous: str, dtype: torch.dtype, *, is_aligned: bool) -> torch.Tensor:
    """An empty tensor of the shape of `values`: its `first`, `last` or `neither` of two dimensions contiguous."""
    *outer, rows, columns = values.shape
    pad = 16 if is_aligned else 1 + rows % 2
    if contiguous == "neither":
        return torch.empty((*outer, rows, 2 * columns), dtype=dtype, device=values.device)[..., ::2]
    if contiguous == "last":
        return torch.empty((*outer, rows, columns + pad), dtype=dtype, device=values.device)[..., :columns]
    return torch.empty((*outer, columns, rows + pad), dtype=dtype, device=values.device)[..., :rows].mT


def random_operand(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal values of `dtype`; for integers spread over most of their range."""
    values = torch.randn(shape, generator=generator, device=generator.device)
    return values.to(dtype) if dtype.is_floating_point else (values * 40).clamp(-128, 127).to(dtype)


def random_at(extent: Extent, dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Random values that lie as `extent` says."""
    return empty_at(extent, dtype, generator).copy_(random_operand(extent.shape, getattr(torch, dtype), generator))


def empty_at(extent: Extent, dtype: str, generator: torch.Generator) -> torch.Tensor:
    """An empty tensor that lies as `extent` says."""
    return torch.empty_strided(extent.shape, extent.strides, dtype=getattr(torch, dtype), device=generator.device)


def lying(values: torch.Tensor, inner: str, dtype: torch.dtype, *, is_padded: bool, shift: int) -> torch.Tensor:
    """A copy of `values`, or of its first column, whose last dimension goes as `inner` says, `shift` elements into memory.

    With `is_padded` no two dimensions merge.
    """
    *outer, n = values.shape
    if inner == "repeat":
        n, values = 1, values[..., :1]
    step = 2 if inner == "any" else 1
    length = shift + step * n
    more = int(is_padded)
    shape = (*outer[:-1], *(rows + more for rows in outer[-1:]), length + more * (16 + -length % 16))
    storage = torch.empty(shape, dtype=dtype, device=values.device)
    rows = storage.narrow(-2, 0, outer[-1]) if outer else storage
    return rows[..., shift:length:step].copy_(values)


def loose_operands(
    specialization: Specialization, config: Config, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Operands of some blocks for a binary that takes any strides: two that step over every other element.

    The first lies across them, unless each element is placed by itself: then it is like them.
    """
    if specialization.inner == ALL_EACH:
        values = numbers((2, config.block_n // 5 + 1, 5), device)
        first = lying(values, "any", dtypes[0], is_padded=True, shift=1)
    else:
        values = numbers((2, config.block_rows + LINE + 1, max(2 * config.block_n, LONG_ROW) + 1), device)
        first = lying(values.mT, "unit", dtypes[0], is_padded=True, shift=1).mT
    return (first, *(lying(values, "any", dtype, is_padded=True, shift=1) for dtype in dtypes[1:]))
