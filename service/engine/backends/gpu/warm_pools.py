"""Pre-warms allocator pools and lazily loaded kernels of torch, before a request would wait for them.

torch keeps the memory that the driver has given it, by stream and by size. The driver loads each of torch's kernels at
its first launch. Either can take tens of milliseconds. Runs in the engine's loop thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

# Tables of copies: a power of two of bytes each, some under way at once.
_PINNED_POWERS = range(6, 17)
_PINNED_OF_EACH = 4
# torch cuts blocks for up to 1 MiB and for more from two pools.
_SMALL_BYTES, _SMALL_BLOCKS = 2**20, 16
_LARGE_BYTES = 256 * 2**20
# Of the device's memory, at most, for the pools of one stream.
_LARGEST_SHARE = 1 / 64


def fill_pools(device: torch.device, streams: Iterable[torch.cuda.Stream]) -> None:
    """Lets torch take memory from the driver for each of the streams, and for tables on the host; it is all free afterwards.

    Where the device has none to spare, requests allocate it themselves.
    """
    pinned = [
        torch.empty(1 << power, dtype=torch.uint8, pin_memory=True)
        for power in _PINNED_POWERS
        for _ in range(_PINNED_OF_EACH)
    ]
    large_bytes = min(_LARGE_BYTES, int(torch.cuda.get_device_properties(device).total_memory * _LARGEST_SHARE))
    for stream in streams:
        with contextlib.suppress(torch.OutOfMemoryError), torch.cuda.stream(stream):
            sizes = [_SMALL_BYTES] * _SMALL_BLOCKS + [large_bytes]
            blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            blocks.clear()
    pinned.clear()


def load_copies(device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Runs the copies between layouts that operands of unusual strides need, once for each dtype."""
    for dtype in dtypes:
        turned = torch.zeros((33, 65), dtype=dtype, device=device).t()
        turned.contiguous()
        turned.copy_(torch.zeros((65, 33), dtype=dtype, device=device)[:, :33])
    torch.cuda.synchronize(device)
