"""The fp64 oracle of reduce. Torch alone."""

from __future__ import annotations

import torch


def reduce_reference(x: torch.Tensor, kind: str, *, axis: int | None = -1, keepdims: bool = False) -> torch.Tensor:
    """The reduction of `x` along `axis`, or over all elements with None, in float64; indices in int64."""
    wide = x.double()
    if axis is None:
        out = reduce_reference(wide.reshape(-1), kind)
        return out.reshape((1,) * x.dim()) if keepdims else out
    if kind in ("argmax", "argmin"):
        # PyTorch does not promise the first of equal elements; a stable sort with NaN in front does.
        order = torch.sort(wide + 0.0, dim=axis, descending=kind == "argmax", stable=True).indices.select(axis, 0)
        nan = wide.isnan()
        out = torch.where(nan.any(axis), nan.int().argmax(axis), order)
        return out.unsqueeze(axis) if keepdims else out
    if kind == "logsumexp":
        return torch.logsumexp(wide, axis, keepdim=keepdims)
    if kind == "norm":
        norm: torch.Tensor = torch.linalg.vector_norm(wide, 2, axis, keepdim=keepdims)
        return norm
    if kind in ("sum", "mean"):
        return wide.sum(axis, keepdim=keepdims) if kind == "sum" else wide.mean(axis, keepdim=keepdims)
    return wide.amax(axis, keepdim=keepdims) if kind == "max" else wide.amin(axis, keepdim=keepdims)
