"""Scratch memory of launches that share sums or copy operands first, one set for each stream.

Partial sums need no initial value; counters are zero between launches, because the program that finishes a tile puts
its counter back. Launches on one stream follow one another and share a set; other streams have their own. Memory that
was handed out is never freed: a captured graph may hold its address.
"""

from __future__ import annotations

import torch

_MIN_PARTIALS = 1 << 23
_MIN_COUNTERS = 1 << 14
_retired: list[torch.Tensor] = []
_Key = tuple[torch.device, int]
_held: dict[_Key, tuple[torch.Tensor, torch.Tensor]] = {}


def workspace(
    device: torch.device, stream: int, num_partials: int, num_counters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """At least `num_partials` float32 of scratch and `num_counters` zeroed int32 for `stream` of `device`.

    The current stream must be `stream`: what is allocated anew is filled on it.

    Returns:
        (partial sums, counters).
    """
    key = (device, stream)
    if key not in _held:
        partial = torch.empty(_room_for(num_partials, _MIN_PARTIALS), dtype=torch.float32, device=device)
        count = torch.zeros(_room_for(num_counters, _MIN_COUNTERS), dtype=torch.int32, device=device)
        _held[key] = partial, count
        return partial, count
    partial, count = _held[key]
    if partial.numel() < num_partials:
        larger = torch.empty(_room_for(num_partials, _MIN_PARTIALS), dtype=torch.float32, device=device)
        _retired.append(partial)
        partial = larger
        _held[key] = partial, count
    if count.numel() < num_counters:
        zeros = torch.zeros(_room_for(num_counters, _MIN_COUNTERS), dtype=torch.int32, device=device)
        _retired.append(count)
        count = zeros
        _held[key] = partial, count
    return partial, count


def _room_for(number: int, least: int) -> int:
    """Returns a power of two, `least` or more."""
    return max(least, 1 << (number - 1).bit_length())
