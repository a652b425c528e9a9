"""Scratch memory of split-K launches, one set for each stream. Knows no kernel.

Partial sums need no initial value; counters are zero between launches, because the program that finishes a tile puts
its counter back. Launches on one stream follow one another and share a set; other streams have their own.
"""

from __future__ import annotations

import torch

_partials: dict[tuple[torch.device, int], torch.Tensor] = {}
_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def workspace(
    device: torch.device, num_partials: int, num_counters: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """At least `num_partials` float32 of scratch and `num_counters` zeroed int32 for the current stream of `device`.

    Returns:
        (partial sums, counters), both None when nothing is asked for.
    """
    if num_partials == 0:
        return None, None
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream)
    if key not in _partials or _partials[key].numel() < num_partials:
        _partials[key] = torch.empty(max(num_partials, 1 << 20), dtype=torch.float32, device=device)
    if key not in _counters or _counters[key].numel() < num_counters:
        _counters[key] = torch.zeros(max(num_counters, 4096), dtype=torch.int32, device=device)
    return _partials[key], _counters[key]
