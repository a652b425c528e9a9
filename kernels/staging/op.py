"""The public `copy_stretches`: many stretches of host or device memory, one launch. Knows no op and no batch."""

from __future__ import annotations

import functools

import torch
import triton

from kernels.staging.kernel import stretches_kernel

# By bytes of a word: what a thread moves at once.
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
BLOCK = 1024


def word_bytes(alignment: int) -> int:
    """The widest word that an alignment allows: 8, 4, 2 or 1.

    Args:
        alignment: The bitwise or of every address, length, row and pitch, in bytes.
    """
    return next(size for size in WORDS if alignment % size == 0)


def copy_stretches(
    table: torch.Tensor,
    longest_words: int,
    word: int,
    *,
    row_words: int = 0,
    pitch_from: int = 0,
    pitch_to: int = 0,
    device: torch.device,
) -> None:
    """Copies every stretch, on the current stream.

    Args:
        table: int64 (R, 3), contiguous, on the device or in pinned host memory: source address, destination address and words
            of each stretch. Host addresses must be registered with the driver, and stay so until the launch has run.
        longest_words: Words of the longest stretch.
        word: Bytes of a word: 8, 4, 2 or 1; divides every address, row and pitch.
        row_words: Words of a row, when one side's rows are padded; 0 when neither is.
        pitch_from: Words from row to row at the sources.
        pitch_to: Words from row to row at the destinations.
        device: The GPU.
    """
    if not longest_words or not len(table):
        return
    grid = (len(table), triton.cdiv(longest_words, BLOCK))
    stretches_kernel[grid](
        table, _unit(word, device), row_words, pitch_from, pitch_to, HAS_ROWS=row_words > 0, BLOCK=BLOCK, num_warps=4
    )


@functools.cache
def _unit(word: int, device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=WORDS[word], device=device)
