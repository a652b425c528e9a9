"""Blocks for rows whose elements lie apart in memory, and for rows too short for lanes of their own: softmax and normalize.

Neighbouring lanes have neighbouring rows, and a thread has many elements of each. So a row is read once, and its sums need
few other threads. Pure: no torch, no Triton, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewire.kernels.runtime.targets import Target


class Block(NamedTuple):
    """What a program holds: `block_n` elements of each of `block_rows` rows."""

    block_rows: int
    block_n: int
    num_warps: int


# By rising length of a row; a thread has whole rows.
BLOCKS = (Block(512, 4, 4), Block(128, 16, 4), Block(128, 32, 4))
INTERPRETED_BLOCKS = (Block(8, 4, 4), Block(8, 16, 4), Block(8, 32, 4))


def blocks_for(target: Target, *, is_rare: bool) -> Sequence[Block]:
    """Blocks by rising length of a row."""
    blocks = INTERPRETED_BLOCKS if target.backend == "interpreter" else BLOCKS
    # Rarer pairs of types have fewer binaries.
    return blocks[1:2] if is_rare else blocks


def block_for(n: int, target: Target, *, is_rare: bool) -> Block:
    """The narrowest block that holds a row of `n` elements, which `is_column`."""
    return next(block for block in blocks_for(target, is_rare=is_rare) if block.block_n >= n)


def is_column(n: int, short_n: int, *, is_rare: bool, is_contiguous: bool, is_aligned: bool) -> bool:
    """Whether rows of `n` elements take these blocks.

    Args:
        n: Elements of a row.
        short_n: Most elements of rows that take them though their elements follow one another.
        is_rare: Whether input and output differ in type.
        is_contiguous: Whether elements of a row follow one another.
        is_aligned: Whether rows can be read and written in 16-byte pieces.
    """
    longest = BLOCKS[1 if is_rare else -1].block_n
    return n <= short_n and not is_aligned if is_contiguous else n <= longest
