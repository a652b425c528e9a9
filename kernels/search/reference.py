"""The oracle of search: float64 scores and a stable sort. Torch alone."""

from __future__ import annotations

import torch


def scores_reference(
    a: torch.Tensor, b: torch.Tensor, *, metric: str = "dot", bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Scores (…, M, N) of queries against items, in float64."""
    a, b = a.double(), b.double()
    scores = (a[..., :, None, :] - b).square().sum(-1) if metric == "l2" else a @ b.mT
    if metric == "cosine":
        norms = a.norm(dim=-1)[..., :, None] * b.norm(dim=-1)
        scores = torch.where(norms == 0, 0.0, scores / norms)
    return scores if bias is None else scores + bias.double()


def search_reference(
    a: torch.Tensor, b: torch.Tensor, k: int, *, metric: str = "dot", bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` best scores and their indices, equal ones by the smaller index, NaN last."""
    scores = scores_reference(a, b, metric=metric, bias=bias)
    worst = float("inf") if metric == "l2" else -float("inf")
    # Two stable sorts: by score with NaN at the end of the numbers, then NaN behind all.
    order = torch.sort(
        scores.nan_to_num(worst, torch.inf, -torch.inf), dim=-1, descending=metric != "l2", stable=True
    ).indices
    is_nan = scores.gather(-1, order).isnan()
    order = order.gather(-1, torch.sort(is_nan.int(), dim=-1, stable=True).indices)[..., :k]
    return scores.gather(-1, order), order
