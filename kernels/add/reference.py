"""The oracle of add: float64, or exact integers. Torch alone."""

from __future__ import annotations

import torch


def add_reference(a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    """A + alpha * b with NumPy broadcasting: int64 for integers, else float64."""
    if not a.is_floating_point():
        return a.long() + int(alpha) * b.long()
    return a.double() + alpha * b.double()
