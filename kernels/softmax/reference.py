"""The fp64 oracle of softmax. Torch alone."""

from __future__ import annotations

import torch


def softmax_reference(x: torch.Tensor, *, axis: int = -1, log: bool = False) -> torch.Tensor:
    """Softmax, or log-softmax, of `x` along `axis` in float64."""
    compute = torch.log_softmax if log else torch.softmax
    return compute(x.double(), dim=axis)
