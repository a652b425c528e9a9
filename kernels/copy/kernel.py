"""Copies of memory: jit bodies only.

`copy_ranges_kernel` copies many ranges in one launch:

    destination_r[place(i, pitch_to_r)] = source_r[place(i, pitch_from_r)]      for i in [0, words_r), for each range r

With rows, place(i, pitch) = (i div row_r)·pitch + i mod row_r: a side whose rows are padded. Without, place(i) = i.
Grid: (blocks of the longest range, ranges). A program moves BLOCK words of one range. No arithmetic; 2·words·itemsize bytes.
Ranges are addressed by number, so that one side may lie in host memory that is registered with the driver. The copy
then runs at the speed of the bus. Only rows have a shape here.

`copy_operands_kernel` lays both operands of a product into rows that bulk copies can read, or their limbs.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.pdl import bring_up_next, wait_for_previous


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
    entry = table_ptr + tl.program_id(1).to(tl.int64) * COLUMNS
    words = tl.load(entry + 2)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
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


@triton.jit
def rounded_to_tf32(x):
    """The nearest float32 that tf32 has, of equally near ones the even one, and never infinity. `x` is finite."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x0FFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(nearest) == float("inf"), (bits & -0x2000).to(tl.float32, bitcast=True), nearest)


@triton.jit
def store_limbs(to, x, mask, span, low_at):
    """Store the limbs of float32 `x`, `span` elements apart: high and low in the order that `low_at` says, then high.

    A product of such rows, one with the low limb first and one with it second, adds up low·high, high·low and high·high: the
    small ones first. Low·low is left out. Only the last high limb keeps what is not finite, which by zero is NaN.
    """
    is_finite = (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    finite = tl.where(is_finite, x, 0.0)
    high = rounded_to_tf32(finite)
    low = rounded_to_tf32(finite - high)
    tl.store(to + low_at, low, mask=mask)
    tl.store(to + (span - low_at), high, mask=mask)
    tl.store(to + 2 * span, tl.where(is_finite, high, x), mask=mask)


@triton.jit
def copy_block(
    source,
    destination,
    block,
    extents,
    pitch,
    strides,
    low_at,
    UNIT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    IS_TURNED: tl.constexpr,
    HAS_LIMBS: tl.constexpr,
):
    """Copy block number `block` of R rows and C columns of one entry; `extents` are (rows, columns), `strides` their steps.

    IS_TURNED: neighbours in memory are neighbours in a column, so neighbouring threads take those. HAS_LIMBS, `low_at`: see
    `store_limbs`.
    """
    rows, columns = extents
    stride_r, stride_c = strides
    across = tl.cdiv(columns, C)
    row = (block // across) * R + tl.arange(0, R)
    column = (block % across) * C + tl.arange(0, C)
    if IS_TURNED:
        turned = source + column.to(tl.int64)[:, None] * stride_c + row[None, :]
        taken = tl.load(turned, mask=(column < columns)[:, None] & (row < rows)[None, :], other=0).T
    else:
        straight = source + row.to(tl.int64)[:, None] * stride_r + column.to(tl.int64)[None, :] * stride_c
        taken = tl.load(straight, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0)
    to = row.to(tl.int64)[:, None] * pitch + column[None, :]
    # Whole pieces of 16 bytes are written; a row's pitch leaves room for the last one.
    filled = tl.cdiv(columns, UNIT) * UNIT
    mask = (row < rows)[:, None] & (column < filled)[None, :]
    if HAS_LIMBS:
        store_limbs(destination + to, taken, mask, filled, low_at * filled)
    else:
        tl.store(destination + to, taken, mask=mask)


@triton.jit
def copy_operands_kernel(
    a_ptr,
    b_ptr,
    a_rows_ptr,
    b_rows_ptr,
    blocks_a,
    blocks,
    entries_a,
    entries_b,
    rows_a,
    rows_b,
    columns_a,
    columns_b,
    pitch_a,
    pitch_b,
    stride_az,
    stride_ar,
    stride_ac,
    stride_bz,
    stride_br,
    stride_bc,
    WORD: tl.constexpr,
    HAS_LIMBS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TURNED_R: tl.constexpr,
    TURNED_C: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Both operands, (entries, rows, columns) in any strides, into rows at multiples of 16 bytes, their ends filled with zeros.

    Grid: `blocks` for each entry: `blocks_a` of `a`, then those of `b`. A block has BLOCK_R × BLOCK_C elements, or
    TURNED_R × TURNED_C where columns are contiguous. Up to FEW programs let the next kernel be brought up at once. Pitches come
    in UNITs of 16 bytes, strides in elements. An operand that is not copied has no blocks. No arithmetic;
    2·entries·rows·columns·itemsize bytes. HAS_LIMBS: rows of limbs of float32 (`store_limbs`), 4·entries·rows·columns·4 bytes.
    """
    # A product that is brought up while many blocks are left takes up to a quarter more time.
    if tl.num_programs(0) <= FEW:
        bring_up_next(OVERLAP)
    wait_for_previous(OVERLAP)
    block = tl.program_id(0) % blocks
    entry = tl.program_id(0) // blocks
    if block < blocks_a:
        source, destination, entries, rows, columns = a_ptr, a_rows_ptr, entries_a, rows_a, columns_a
        pitch, stride_z, stride_r, stride_c = pitch_a, stride_az, stride_ar, stride_ac
        low_at = 0
    else:
        block -= blocks_a
        source, destination, entries, rows, columns = b_ptr, b_rows_ptr, entries_b, rows_b, columns_b
        pitch, stride_z, stride_r, stride_c = pitch_b, stride_bz, stride_br, stride_bc
        low_at = 1
    if entry >= entries:
        return
    pitch = pitch.to(tl.int64) * UNIT
    source = source.to(tl.pointer_type(WORD)) + entry.to(tl.int64) * stride_z
    destination = destination.to(tl.pointer_type(WORD)) + entry.to(tl.int64) * rows * pitch
    extents = (rows, columns)
    strides = (stride_r, stride_c)
    # As `Copied.is_turned`, by which blocks are counted.
    if stride_r == 1:
        copy_block(
            source, destination, block, extents, pitch, strides, low_at, UNIT, TURNED_R, TURNED_C, True, HAS_LIMBS
        )
    else:
        copy_block(
            source, destination, block, extents, pitch, strides, low_at, UNIT, BLOCK_R, BLOCK_C, False, HAS_LIMBS
        )
