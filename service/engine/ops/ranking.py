"""Chooses the best elements of rows on the CPU, for `search` and `topk`."""

from __future__ import annotations

import torch

# Most elements that are ranked at once: 1 MiB of keys, which a core's cache has room for.
MAX_RANKED = 2**17
_INDEX_MASK = 0xFFFFFFFF


def best(
    values: torch.Tensor, k: int, *, largest: bool, is_nan_large: bool, axis: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses k elements along an axis, best first; among equals those of the smaller index.

    Each element gets an int64 key of its own: its rank, then its index counted from the end. So any selection of the largest
    keys keeps the order among equals, and nothing is sorted but the k chosen.

    Args:
        values: float16, bfloat16 or float32, fewer than 2^32 along the axis.
        k: Number of elements.
        largest: Whether larger elements are better.
        is_nan_large: Whether NaN counts as larger than every number; else it comes after every number.
        axis: The axis.

    Returns:
        The values and their int64 indices, k along the axis.
    """
    moved = values.movedim(axis, -1)
    count = moved.shape[-1]
    rows = moved.reshape(-1, count)
    countdown = torch.arange(_INDEX_MASK, _INDEX_MASK - count, -1)
    chosen = torch.empty((len(rows), k), dtype=torch.int64)
    at_once = max(1, MAX_RANKED // max(count, 1))
    for part, into in zip(torch.split(rows, at_once), torch.split(chosen, at_once), strict=True):
        keys = _ranks(part, largest=largest, is_nan_large=is_nan_large).bitwise_left_shift_(32).add_(countdown)
        into.copy_(keys.topk(k).values)
    indices = _INDEX_MASK - chosen.bitwise_and_(_INDEX_MASK)
    shape = (*moved.shape[:-1], k)
    return rows.gather(-1, indices).view(shape).movedim(-1, axis), indices.view(shape).movedim(-1, axis)


def _ranks(values: torch.Tensor, *, largest: bool, is_nan_large: bool) -> torch.Tensor:
    """int64 of 32 bits: the better an element, the greater. 0 and -0 are equal, and so is every NaN."""
    # Adding 0 makes 0 of -0.
    bits = values.float().add(0.0).view(torch.int32)
    # Of numbers below 0 all bits but the sign count down.
    ranks = bits.bitwise_xor((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()
    if not largest:
        ranks.neg_()
    return ranks.masked_fill_(values.isnan(), 2**31 - 1 if largest and is_nan_large else -(2**31))
