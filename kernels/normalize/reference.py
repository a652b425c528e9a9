"""The fp64 oracle of normalize. Torch alone."""

from __future__ import annotations

import torch


def normalize_reference(
    x: torch.Tensor,
    kind: str,
    eps: float,
    *,
    axis: int = -1,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The normalisation of `x` along `axis` in float64."""
    rows = x.double().movedim(axis, -1)
    if kind == "l2":
        out: torch.Tensor = rows / rows.norm(dim=-1, keepdim=True).clamp(min=eps)
    else:
        centred = rows - rows.mean(-1, keepdim=True) if kind == "layer" else rows
        out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight.double()
    out = out if bias is None else out + bias.double()
    return out.movedim(-1, axis)
