"""Blocks for rows whose elements lie apart in memory, and for rows too short for lanes of their own: softmax and normalize.

Neighbouring lanes have neighbouring rows. Where pieces of memory hold several rows side by side, a program holds its rows
whole. Else it walks down them once for their sums and once more to write. It takes few elements at a time: so all programs read
the same part of memory, and the second time it is in the cache. Pure: no torch, no Triton, no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import Target


class Block(NamedTuple):
    """What a program takes at a time: `block_n` elements of each of `block_rows` rows."""

    block_rows: int
    block_n: int
    num_warps: int


class Blocks(NamedTuple):
    """Blocks for short rows, for longer ones, and where rows are few, so that many threads must share each.

    Then blocks that hold rows whole, by rising length, by how many rows are read at once.
    """

    short: Block
    long: Block
    few: Block
    held: Mapping[int, tuple[Block, ...]]


# Rows that are read at once where those of 16 bytes cannot be.
PAIR = 2
# Of some 30, within a fifth of the best for most rows of 5 to 300 elements (H200; docs/kernels.md has the figures).
_WALKED = (Block(256, 1, 8), Block(64, 4, 2), Block(16, 16, 2))
# Read one by one, rows that are held took three times as long as rows that are walked. In pieces they take a half to a seventh:
# 8 × 784 rows of 512 float16 elements 6 instead of 42 µs, 48,576 of 550 51 instead of 173 (H200).
# Normalised, 2,048 elements of 16 float32 rows would not fit into the registers of a program.
_HELD = (Block(64, 64, 4), Block(32, 128, 4), Block(32, 256, 4), Block(16, 512, 4), Block(16, 1024, 8))
_PAIRS = (_HELD[1], _HELD[3], _HELD[4])
_BLOCKS = Blocks(*_WALKED, {8: (*_HELD, Block(16, 2048, 16)), 4: (*_HELD, Block(8, 2048, 8)), PAIR: _PAIRS})
_INTERPRETED_HELD = dict.fromkeys((8, 4), (Block(8, 64, 4), Block(8, 2048, 4))) | {PAIR: (Block(8, 1024, 4),)}
_INTERPRETED = Blocks(Block(8, 1, 4), Block(8, 4, 4), Block(8, 16, 4), _INTERPRETED_HELD)
# Elements of the longest short rows: those that lie apart, and those that follow one another, which share lines of the cache.
_SHORT, _SHORT_CONTIGUOUS = 32, 4
# Rows that lie apart are copied first from this length on. Walking down 1,400 elements took 63 µs for 336 rows, and 11 with
# the copies; both took 220 for 2,048 elements of 8,192 rows (H200).
COPIED_N = 1024


def count_side_by_side(
    n: int, rows_inner: int, strides: Sequence[tuple[int, int, int]], dtype: str, out_dtype: str
) -> int:
    """How many rows of `n` elements across memory are read at once: those of 16 bytes, a pair, or 1.

    Args:
        n: Elements of a row.
        rows_inner: Extent of the inner of the two dimensions that rows are numbered over.
        strides: Those of each tensor, (outer, inner, n). Each starts at a multiple of 16 bytes.
        dtype: Name of the input's dtype.
        out_dtype: Name of the output's dtype.
    """
    if n <= _SHORT or any(inner != 1 for _, inner, _ in strides):
        return 1
    steps = [rows_inner, *(step for outer, _, along in strides for step in (outer, along))]
    return max(count for count in counts_side_by_side(dtype, out_dtype) if all(step % count == 0 for step in steps))


def counts_side_by_side(dtype: str, out_dtype: str) -> tuple[int, ...]:
    """What `count_side_by_side` can be for a pair of types; rarer pairs have fewer binaries."""
    return (1, PAIR, 16 // ITEM_BYTES[dtype]) if dtype == out_dtype else (1,)


def blocks_for(target: Target, side_by_side: int) -> tuple[Block, ...]:
    """All blocks on `target` for rows of which so many are read at once."""
    blocks = _INTERPRETED if target.backend == "interpreter" else _BLOCKS
    return (blocks.short, blocks.long, blocks.few) if side_by_side == 1 else blocks.held[side_by_side]


def block_for(n: int, target: Target, *, is_contiguous: bool, side_by_side: int, is_few: bool = False) -> Block:
    """The block for rows of `n` elements, which `is_across`; `is_few`: threads share those that are walked."""
    if side_by_side > 1:
        return next(block for block in blocks_for(target, side_by_side) if block.block_n >= n)
    short, long, few = blocks_for(target, 1)
    if n <= (_SHORT_CONTIGUOUS if is_contiguous else _SHORT):
        return short
    return few if is_few else long


def is_across(n: int, short_n: int, *, is_contiguous: bool, is_aligned: bool, side_by_side: int) -> bool:
    """Whether rows of `n` elements take these blocks.

    Args:
        n: Elements of a row.
        short_n: Most elements of rows that take them though their elements follow one another.
        is_contiguous: Whether elements of a row follow one another.
        is_aligned: Whether rows can be read and written in 16-byte pieces.
        side_by_side: Rows that are read at once.
    """
    if is_contiguous:
        return n <= short_n and not is_aligned
    return n < COPIED_N or (side_by_side > 1 and n <= _BLOCKS.held[side_by_side][-1].block_n)
