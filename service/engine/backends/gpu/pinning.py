"""Pins host memory for the device piece by piece, so that others get at the driver in between.

The driver keeps a lock while it pins, and while it unpins, and launches wait for it: `docs/benchmarks.md` has the figures.
Kernels read and write over the seams. A copy by the copy engine must lie in one piece.
"""

from __future__ import annotations

import time

import torch

# Seams are at multiples of this from where the memory begins. The driver takes 2.5 ms for twice as much (H100, 2026-11-28).
PIECE_BYTES = 32 * 2**20
# The driver's lock is not fair: without a pause, who waits for it can wait for many pieces.
PAUSE_S = 0.0005


def pin(memory: torch.Tensor) -> int:
    """Pins flat memory that begins on a page; for any thread, whose device it is pinned for.

    Returns:
        0, or the driver's error: then nothing of it is pinned.
    """
    runtime, base = torch.cuda.cudart(), memory.data_ptr()
    for begin, end in spans_of(0, memory.numel()):
        if status := int(runtime.cudaHostRegister(base + begin, end - begin, 0)):
            unpin(memory[:begin])
            return status
        time.sleep(PAUSE_S)
    return 0


def unpin(memory: torch.Tensor) -> None:
    """Undoes `pin`."""
    runtime, base = torch.cuda.cudart(), memory.data_ptr()
    for begin, _ in spans_of(0, memory.numel()):
        runtime.cudaHostUnregister(base + begin)
        time.sleep(PAUSE_S)


def spans_of(offset: int, nbytes: int) -> list[tuple[int, int]]:
    """Cuts bytes of pinned memory at its seams.

    Args:
        offset: From where the memory begins.
        nbytes: From there.

    Returns:
        Begin and end of each part, counted from `offset`.
    """
    first = PIECE_BYTES - offset % PIECE_BYTES
    if nbytes <= first:
        return [(0, nbytes)] if nbytes else []
    begins = [0, *range(first, nbytes, PIECE_BYTES)]
    return list(zip(begins, [*begins[1:], nbytes], strict=True))
