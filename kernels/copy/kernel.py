"""Copies many ranges of memory in one launch: the body of `copy_ranges`.

    destination_r[place(i, pitch_to_r)] = source_r[place(i, pitch_from_r)]      for i in [0, words_r), for each range r

With rows, place(i, pitch) = (i div row_r)·pitch + i mod row_r: a side whose rows are padded. Without, place(i) = i.
Grid: (ranges, blocks of the longest one). A program moves BLOCK words of one range. No arithmetic; 2·words·itemsize bytes.
Ranges are addressed by number, so that one side may lie in host memory that is registered with the driver: the copy then
runs at the speed of the bus. Only rows have a shape here.
"""

import triton
import triton.language as tl


@triton.jit
def copy_ranges_kernel(
    table_ptr,
    WORD: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves one block of one range; see the module.

    A row of the table, in int64: source, destination, words, words of a row, pitch of the source, pitch of the destination.
    """
    entry = table_ptr + tl.program_id(0).to(tl.int64) * COLUMNS
    words = tl.load(entry + 2)
    begin = tl.program_id(1).to(tl.int64) * BLOCK
    if begin >= words:
        return
    source = tl.load(entry).to(tl.pointer_type(WORD))
    destination = tl.load(entry + 1).to(tl.pointer_type(WORD))
    offs = begin + tl.arange(0, BLOCK)
    mask = offs < words
    offs_from = offs
    offs_to = offs
    if HAS_ROWS:
        row_words = tl.load(entry + 3)
        row = offs // row_words
        column = offs % row_words
        offs_from = row * tl.load(entry + 4) + column
        offs_to = row * tl.load(entry + 5) + column
    tl.store(destination + offs_to, tl.load(source + offs_from, mask=mask), mask=mask)
