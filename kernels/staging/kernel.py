"""Copies many stretches of memory in one launch: the body of `copy_stretches`.

    destination_r[place(i, pitch_to)] = source_r[place(i, pitch_from)]      for i in [0, words_r), for each stretch r

With rows, place(i, pitch) = (i div row)·pitch + i mod row: a side whose rows are padded. Without, place(i) = i.
Grid: (stretches, blocks of the longest one). A program moves BLOCK words of one stretch. No arithmetic; 2·words·itemsize bytes.
Stretches are addressed by number, so that one side may lie in host memory that is registered with the driver: the copy then
runs at the speed of the bus. Knows no tensor shape beyond rows.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_words", "pitch_from", "pitch_to"])
def stretches_kernel(
    table_ptr,
    unit_ptr,
    row_words: tl.int64,
    pitch_from: tl.int64,
    pitch_to: tl.int64,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves one block of one stretch; see the module. Table rows: source, destination, words, in int64.

    `unit_ptr` is never read: its type is that of a word.
    """
    entry = table_ptr + tl.program_id(0).to(tl.int64) * 3
    source = tl.load(entry).to(unit_ptr.dtype, bitcast=True)
    destination = tl.load(entry + 1).to(unit_ptr.dtype, bitcast=True)
    words = tl.load(entry + 2)
    offs = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < words
    offs_from = offs
    offs_to = offs
    if HAS_ROWS:
        row = offs // row_words
        column = offs % row_words
        offs_from = row * pitch_from + column
        offs_to = row * pitch_to + column
    tl.store(destination + offs_to, tl.load(source + offs_from, mask=mask), mask=mask)
