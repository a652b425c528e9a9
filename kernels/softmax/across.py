"""Blocks for rows whose elements lie apart in memory, and for rows too short for lanes of their own: softmax and normalize.

Neighbouring lanes have neighbouring rows. A program walks down its rows once for their sums and once more to write. It takes
few elements at a time: so all programs read the same part of memory, and the second time it is in the cache. Pure: no torch,
no Triton, no device.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewire.kernels.runtime.targets import Target


class Block(NamedTuple):
    """What a program takes at a time: `block_n` elements of each of `block_rows` rows."""

    block_rows: int
    block_n: int
    num_warps: int


class Blocks(NamedTuple):
    """Blocks for short rows, for longer ones, and where rows are few, so that many threads must share each."""

    short: Block
    long: Block
    few: Block


# Of some 30, within a fifth of the best for most rows of 5 to 300 elements (H200; docs/kernels.md has the figures).
_BLOCKS = Blocks(Block(256, 1, 8), Block(64, 4, 2), Block(16, 16, 2))
_INTERPRETED = Blocks(Block(8, 1, 4), Block(8, 4, 4), Block(8, 16, 4))
# Elements of the longest short rows: those that lie apart, and those that follow one another, which share lines of the cache.
_SHORT, _SHORT_CONTIGUOUS = 32, 4
# Rows that lie apart are copied first from this length on. Walking down 1,400 elements took 63 µs for 336 rows, and 11 with
# the copies; both took 220 for 2,048 elements of 8,192 rows (H200).
COPIED_N = 1024


def blocks_for(target: Target) -> Blocks:
    """All blocks on `target`."""
    return _INTERPRETED if target.backend == "interpreter" else _BLOCKS


def block_for(n: int, target: Target, *, is_contiguous: bool, is_few: bool = False) -> Block:
    """The block for rows of `n` elements, which `is_across`; `is_few`: threads share the longer ones."""
    blocks = blocks_for(target)
    if n <= (_SHORT_CONTIGUOUS if is_contiguous else _SHORT):
        return blocks.short
    return blocks.few if is_few else blocks.long


def is_across(n: int, short_n: int, *, is_contiguous: bool, is_aligned: bool) -> bool:
    """Whether rows of `n` elements take these blocks.

    Args:
        n: Elements of a row.
        short_n: Most elements of rows that take them though their elements follow one another.
        is_contiguous: Whether elements of a row follow one another.
        is_aligned: Whether rows can be read and written in 16-byte pieces.
    """
    return n <= short_n and not is_aligned if is_contiguous else n < COPIED_N
