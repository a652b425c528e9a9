"""Chooses the best elements of rows on the CPU, for `search` and `topk`."""

from __future__ import annotations

import torch

# Elements of a block, of which only the best one is ranked at first. Extrema of blocks of 16 take ten times as long.
BLOCK = 64
# Fewest elements of which that is done: below, finding the extrema takes longer than ranking all.
MIN_IN_BLOCKS = 2**15
# Most elements that are ranked at once: 1 MiB of keys, which a core's cache has room for.
MAX_RANKED = 2**17
_INDEX_MASK = 0xFFFFFFFF


def best(
    values: torch.Tensor, k: int, *, largest: bool, is_nan_large: bool, axis: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses k elements along an axis, best first; among equals those of the smaller index.

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
    rows = moved.reshape(-1, moved.shape[-1])
    indices = _indices(rows, k, largest=largest, is_nan_large=is_nan_large)
    shape = (*moved.shape[:-1], k)
    return rows.gather(-1, indices).view(shape).movedim(-1, axis), indices.view(shape).movedim(-1, axis)


def _indices(rows: torch.Tensor, k: int, *, largest: bool, is_nan_large: bool) -> torch.Tensor:
    """int64 (M, k) indices of the best elements of (M, N) rows.

    Each element gets an int64 key of its own: its rank, then its index counted from the end. So any selection of the largest
    keys keeps the order among equals, and nothing is sorted but the k chosen. Of long rows only the elements of the best
    blocks get one.
    """
    count = rows.shape[-1]
    if count >= 2 * k * BLOCK and rows.numel() >= MIN_IN_BLOCKS:
        candidates = _candidates(rows, k, largest=largest, is_nan_large=is_nan_large)
        if candidates is not None:
            chosen = _indices(rows.gather(-1, candidates), k, largest=largest, is_nan_large=is_nan_large)
            return candidates.gather(-1, chosen)
    countdown = torch.arange(_INDEX_MASK, _INDEX_MASK - count, -1)
    chosen = torch.empty((len(rows), k), dtype=torch.int64)
    at_once = max(1, MAX_RANKED // max(count, 1))
    for part, into in zip(torch.split(rows, at_once), torch.split(chosen, at_once), strict=True):
        keys = _ranks(part, largest=largest, is_nan_large=is_nan_large).bitwise_left_shift_(32).add_(countdown)
        into.copy_(keys.topk(k).values)
    return _INDEX_MASK - chosen.bitwise_and_(_INDEX_MASK)


def _candidates(rows: torch.Tensor, k: int, *, largest: bool, is_nan_large: bool) -> torch.Tensor | None:
    """int64 (M, C) indices, in their order, of the elements of each row's k best blocks, and of those behind the last block.

    A block is as good as its best element. An element of any other block is beaten by the best ones of k blocks. Returns None
    where NaN would hide a block's best number.
    """
    count = rows.shape[-1] // BLOCK
    blocks = rows[:, : count * BLOCK].view(len(rows), count, BLOCK)
    extrema = blocks.amax(-1) if largest else blocks.amin(-1)
    if not (largest and is_nan_large) and bool(extrema.isnan().any()):
        return None
    chosen = _indices(extrema, k, largest=largest, is_nan_large=is_nan_large).sort(-1).values
    inside = (chosen.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten(-2)
    return torch.cat([inside, torch.arange(count * BLOCK, rows.shape[-1]).expand(len(rows), -1)], -1)


def _ranks(values: torch.Tensor, *, largest: bool, is_nan_large: bool) -> torch.Tensor:
    """int64 of 32 bits: the better an element, the greater. 0 and -0 are equal, and so is every NaN."""
    # Adding 0 makes 0 of -0.
    bits = values.float().add(0.0).view(torch.int32)
    # Of numbers below 0 all bits but the sign count down.
    ranks = bits.bitwise_xor((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()
    if not largest:
        ranks.neg_()
    # A maximum is NaN where any element is, and found in a tenth of the time.
    if not values.numel() or not values.amax().isnan():
        return ranks
    return ranks.masked_fill_(values.isnan(), 2**31 - 1 if largest and is_nan_large else -(2**31))
