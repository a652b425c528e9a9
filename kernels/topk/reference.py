"""The oracle of top-k: a stable sort. Torch alone."""

from __future__ import annotations

import torch


def topk_reference(
    x: torch.Tensor, k: int, *, axis: int = -1, largest: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` best elements along `axis` in order, equal ones by the smaller index, NaN above every number."""
    rows = x.movedim(axis, -1)
    # A stable descending sort keeps equal elements in order of their index, and puts NaN first.
    order = torch.sort(rows.double() + 0.0, dim=-1, descending=largest, stable=True).indices[..., :k]
    return rows.gather(-1, order).movedim(-1, axis), order.movedim(-1, axis)
