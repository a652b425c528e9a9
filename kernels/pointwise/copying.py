"""Copies of tensors that lie anyhow, by the kernel of pointwise functions: PyTorch reads transposed ones from a line each."""

from __future__ import annotations

import torch

from tilewire.kernels.pointwise.op import prepare
from tilewire.kernels.runtime.kinds import FLOATS, name_of


def copy_into(out: torch.Tensor, x: torch.Tensor) -> None:
    """Writes `x` into `out` of its shape and dtype, whatever their strides."""
    if out.numel() and name_of(x.dtype) in FLOATS:
        # The negative of the negative keeps the sign of a zero.
        prepare(x, None, out, "neg", -1.0, 0.0)(x, None, out)
    else:
        out.copy_(x)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` if it is contiguous, else a copy that is."""
    if x.is_contiguous():
        return x
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    copy_into(found, x)
    return found
