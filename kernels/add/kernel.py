"""The add kernel: jit bodies only.

Computes out = a + alpha * b elementwise over broadcast operands; 2 flops an element, and three elements moved at most.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.elements import wrapped
from tilewire.kernels.runtime.pdl import await_previous

# Types of the output, where the binary does not name it; see `op.KINDS`.
FLOAT16 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT32 = tl.constexpr(3)
FLOAT64 = tl.constexpr(4)
INT32 = tl.constexpr(5)


@triton.jit
def divided(number, divisor, extent):
    """Quotient and remainder of 32-bit `number` by `extent`, of which `walks.divisor_of` made `divisor`."""
    factor, shift = (divisor >> 5).to(tl.uint32), (divisor & 31).to(tl.uint32)
    quotient = (tl.umulhi(number.to(tl.uint32), factor) >> shift).to(tl.int32)
    return quotient, number - quotient * tl.cast(extent, tl.int32)


@triton.jit
def narrow_indices(row, extents, divisors):
    """Indices of rows over three dimensions, outermost first, in 32 bits."""
    above, inner = divided(row, divisors[1], extents[1])
    outer, middle = divided(above, divisors[0], extents[0])
    return outer, middle, inner


@triton.jit
def wide_indices(first, more, extents, MOST: tl.constexpr):
    """Indices of rows `first` + `more`, below MOST, in 64 bits. Those of `first` are divided for, the others carry."""
    extent_1, extent_2 = extents
    carry, inner = wrapped(first % extent_2 + more, extent_2, MOST)
    above = first // extent_2
    carry, middle = wrapped(above % extent_1 + carry, extent_1, MOST)
    return above // extent_1 + carry, middle, inner


@triton.jit
def indices_of(first, rows, extents, divisors, is_narrow, OUTER_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Indices of the rows of a block that are numbered over OUTER_RANK dimensions, 0, 1 or 3.

    Divisions are slow enough to show in small additions: none where the innermost dimension holds all `rows`, and only
    multiplications where 32 bits hold what there is.
    """
    row = tl.minimum(first + tl.arange(0, BLOCK_ROWS), rows - 1)
    outer = row * 0
    middle = row * 0
    inner = row
    if OUTER_RANK == 3:  # noqa: SIM102 - the first is decided when compiling
        if extents[1] < rows:
            if is_narrow:
                near = narrow_indices(row.to(tl.int32), extents, divisors)
                outer, middle, inner = near[0].to(tl.int64), near[1].to(tl.int64), near[2].to(tl.int64)
            else:
                outer, middle, inner = wide_indices(first, (row - first).to(tl.int32), extents, BLOCK_ROWS)
    return outer, middle, inner


@triton.jit
def row_starts(indices, strides, UNIT: tl.constexpr, OUTER_RANK: tl.constexpr):
    """Offsets of rows at `indices`; strides come in UNITs."""
    outer, middle, inner = indices
    stride_0, stride_1, stride_2 = strides
    if OUTER_RANK == 0:
        starts = inner * 0
    elif OUTER_RANK == 1:
        starts = inner * (stride_2 * UNIT)
    else:
        starts = (outer * stride_0 + middle * stride_1 + inner * stride_2) * UNIT
    return starts


@triton.jit
def offsets_of(indices, column, strides, stride_n):
    """Offsets of elements, found in as many bits as their indices have."""
    outer, middle, inner = indices
    stride_0, stride_1, stride_2 = strides
    BITS: tl.constexpr = column.dtype
    outside = outer * tl.cast(stride_0, BITS) + middle * tl.cast(stride_1, BITS)
    return (outside + inner * tl.cast(stride_2, BITS) + column * tl.cast(stride_n, BITS)).to(tl.int64)


@triton.jit
def place_each(rows, n, extents, divisors, is_narrow, a, b, out, BLOCK: tl.constexpr):
    """Places of BLOCK elements that follow one another; see `place_tile`. Neighbouring threads have neighbours."""
    a_ptr, strides_a, stride_an = a
    b_ptr, strides_b, stride_bn = b
    strides_o, stride_on = out
    lane = tl.arange(0, BLOCK)[None, :]
    first = tl.program_id(0).to(tl.int64) * BLOCK
    left = tl.minimum(rows * n - first, BLOCK).to(tl.int32)
    if is_narrow:
        row, column = divided(first.to(tl.int32) + lane, divisors[2], n)
        near = narrow_indices(row, extents, divisors)
        from_a = offsets_of(near, column, strides_a, stride_an)
        from_b = offsets_of(near, column, strides_b, stride_bn)
        to_out = offsets_of(near, column, strides_o, stride_on)
    else:
        more, place = wrapped(first % n + lane, n, BLOCK)
        far = wide_indices(first // n, more, extents, BLOCK)
        from_a = offsets_of(far, place, strides_a, stride_an)
        from_b = offsets_of(far, place, strides_b, stride_bn)
        to_out = offsets_of(far, place, strides_o, stride_on)
    return (a_ptr, from_a, False), (b_ptr, from_b, False), to_out, lane, lane < left, left < BLOCK


@triton.jit
def column_indices(first, near, n, extent_1, divisors, is_narrow, MOST: tl.constexpr):
    """Indices of columns `first` + `near`, below MOST, over the outer two dimensions and the last, in 64 bits."""
    if is_narrow:
        above, place = divided(first.to(tl.int32) + near, divisors[2], n)
        top, below = divided(above, divisors[0], extent_1)
        outer, middle, column = top.to(tl.int64), below.to(tl.int64), place.to(tl.int64)
    else:
        carry, column = wrapped(first % n + near, n, MOST)
        whole = first // n
        carry, middle = wrapped(whole % extent_1 + carry, extent_1, MOST)
        outer = (whole // extent_1 + carry).to(tl.int64)
    return outer, middle, column


@triton.jit
def offsets_across(row, columns, strides, stride_n):
    """Offsets of the rows and columns of a tile."""
    outer, middle, column = columns
    return row * strides[2], outer * strides[0] + middle * strides[1] + column * stride_n


@triton.jit
def place_across(
    rows, n, extents, divisors, is_narrow, a, b, out, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Places of a tile whose rows are indices of the last of the outer dimensions, and its columns those of all others.

    See `place_tile`.
    """
    extent_1, extent_2 = extents
    # Programs are fewer than 2^31. Those that follow one another share lines of an operand that lies across.
    row_blocks = tl.cdiv(extent_2, BLOCK_ROWS).to(tl.int32)
    first_row = (tl.program_id(0) % row_blocks).to(tl.int64) * BLOCK_ROWS
    first = (tl.program_id(0) // row_blocks).to(tl.int64) * BLOCK_COLUMNS
    left = rows // extent_2 * n - first
    lane = tl.arange(0, BLOCK_COLUMNS)
    row = first_row + tl.arange(0, BLOCK_ROWS)
    mask = (row < extent_2)[:, None] & (lane < left)[None, :]
    columns = column_indices(first, lane, n, extent_1, divisors, is_narrow, BLOCK_COLUMNS)
    out_row, out_column = offsets_across(row, columns, out[0], out[1])
    is_cut = (left < BLOCK_COLUMNS) | (first_row + BLOCK_ROWS > extent_2)
    # Said to follow one another, which most do, so that neighbouring threads take neighbouring columns.
    to_out = tl.max_contiguous(out_row[:, None] + out_column[None, :], (1, BLOCK_COLUMNS))
    a_ptr, strides_a, stride_an = a
    b_ptr, strides_b, stride_bn = b
    from_a = offsets_across(row, columns, strides_a, stride_an)
    from_b = offsets_across(row, columns, strides_b, stride_bn)
    is_a_turned = (strides_a[2] > 0) & (strides_a[2] < stride_an)
    is_b_turned = (strides_b[2] > 0) & (strides_b[2] < stride_bn)
    return (a_ptr, from_a, is_a_turned), (b_ptr, from_b, is_b_turned), to_out, lane, mask, is_cut


@triton.jit
def place_tile(
    rows,
    n,
    sizes,
    is_narrow,
    a,
    b,
    out,
    UNIT: tl.constexpr,
    A_INNER: tl.constexpr,
    B_INNER: tl.constexpr,
    OUT_INNER: tl.constexpr,
    OUTER_RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The tile of this program: places of its elements in both operands and the output.

    `a` and `b` are (pointer, strides of the outer dimensions, stride of the last); `out` is the same without a pointer.
    `sizes` is (extents of the inner two of the outer dimensions, divisors). For "each" in OUT_INNER the tile has BLOCK_N
    elements that follow one another, for "across" the rows of `place_across`, else rows of the last dimension.

    Returns:
        Both operands as `load_tile` takes them, offsets in the output, offsets along a row, the mask of elements that there
        are, and whether it leaves any out.
    """
    extents, divisors = sizes
    if OUT_INNER == "each":
        placed = place_each(rows, n, extents, divisors, is_narrow, a, b, out, BLOCK_N)
    elif OUT_INNER == "across":
        placed = place_across(rows, n, extents, divisors, is_narrow, a, b, out, BLOCK_ROWS, BLOCK_N)
    else:
        a_ptr, strides_a, _ = a
        b_ptr, strides_b, _ = b
        strides_o, _ = out
        # Programs are fewer than 2^31, and short divisions are several times as fast.
        column_blocks = tl.cdiv(n, BLOCK_N).to(tl.int32)
        pid = tl.program_id(0)
        first_row = (pid // column_blocks).to(tl.int64) * BLOCK_ROWS
        first_n = (pid % column_blocks).to(tl.int64) * BLOCK_N
        row = first_row + tl.arange(0, BLOCK_ROWS)
        offs_n = tl.arange(0, BLOCK_N)[None, :]
        indices = indices_of(first_row, rows, extents, divisors, is_narrow, OUTER_RANK, BLOCK_ROWS)
        from_a = row_starts(indices, strides_a, 1 if A_INNER == "repeat" else UNIT, OUTER_RANK)[:, None]
        from_b = row_starts(indices, strides_b, 1 if B_INNER == "repeat" else UNIT, OUTER_RANK)[:, None]
        to_out = row_starts(indices, strides_o, UNIT, OUTER_RANK)[:, None]
        a_ptr += first_n * (1 if A_INNER == "unit" else 0)
        b_ptr += first_n * (1 if B_INNER == "unit" else 0)
        to_out += first_n + offs_n.to(tl.int64)
        mask = (row < rows)[:, None] & (first_n + offs_n < n)
        is_cut = (first_n + BLOCK_N > n) | (first_row + BLOCK_ROWS > rows)
        placed = (a_ptr, from_a, False), (b_ptr, from_b, False), to_out, offs_n, mask, is_cut
    return placed


@triton.jit
def load_tile(operand, offs_n, mask, INNER: tl.constexpr):
    """A (rows, BLOCK_N) tile; INNER is "unit" or "repeat": the stride along n is 1 or 0.

    `operand` is (pointer, offsets of the rows, stride along n). For "each" the offsets are those of elements, and for "across"
    those of rows and of columns, and the last says whether neighbours in memory are neighbours in a column: then threads
    that follow one another read those, and exchange what they have read.
    """
    ptr, starts, is_turned = operand
    if INNER == "across":
        from_row, from_column = starts
        if is_turned:
            # As the output's offsets, these are said to follow one another.
            turned = tl.max_contiguous(from_column[:, None] + from_row[None, :], (1, from_row.shape[0]))
            tile = tl.trans(tl.load(ptr + turned, mask=None if mask is None else tl.trans(mask)))
        else:
            straight = tl.max_contiguous(from_row[:, None] + from_column[None, :], (1, from_column.shape[0]))
            tile = tl.load(ptr + straight, mask=mask)
    elif INNER == "each":
        tile = tl.load(ptr + starts, mask=mask)
    elif INNER == "unit":
        tile = tl.load(ptr + starts + offs_n, mask=mask)
    else:
        tile = tl.load(ptr + starts + tl.zeros_like(offs_n), mask=mask)
    return tile


@triton.jit
def store_as(total, out_ptr, offs, mask, TYPE: tl.constexpr):
    """Store `total` converted to TYPE at elements `offs`, whatever `out_ptr` is said to point to."""
    if tl.bfloat16 == TYPE:
        total = total.to(tl.float32)  # The interpreter has no other way to bfloat16.
    tl.store(out_ptr.to(tl.pointer_type(TYPE)) + offs, total.to(TYPE), mask=mask)


@triton.jit
def add_tile(
    a,
    b,
    out_ptr,
    alpha,
    to_out,
    offs_n,
    mask,
    out_kind,
    A_INNER: tl.constexpr,
    B_INNER: tl.constexpr,
    COMPUTE: tl.constexpr,
    IS_TYPED: tl.constexpr,
):
    """One tile of a + alpha * b, computed in COMPUTE. Unless IS_TYPED, `out_kind` is the output's type."""
    a = load_tile(a, offs_n, mask, A_INNER)
    b = load_tile(b, offs_n, mask, B_INNER)
    total = a.to(COMPUTE) + tl.full((1, 1), alpha, COMPUTE) * b.to(COMPUTE)
    if IS_TYPED:
        store_as(total, out_ptr, to_out, mask, out_ptr.dtype.element_ty)
    elif out_kind == FLOAT16:
        store_as(total, out_ptr, to_out, mask, tl.float16)
    elif out_kind == BFLOAT16:
        store_as(total, out_ptr, to_out, mask, tl.bfloat16)
    elif out_kind == FLOAT32:
        store_as(total, out_ptr, to_out, mask, tl.float32)
    elif out_kind == FLOAT64:
        store_as(total, out_ptr, to_out, mask, tl.float64)
    elif out_kind == INT32:
        store_as(total, out_ptr, to_out, mask, tl.int32)
    else:
        store_as(total, out_ptr, to_out, mask, tl.int64)


@triton.jit
def add_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    alpha,
    rows,
    n,
    extent_1,
    extent_2,
    divisor_1,
    divisor_2,
    divisor_n,
    is_narrow,
    stride_a0,
    stride_a1,
    stride_a2,
    stride_an,
    stride_b0,
    stride_b1,
    stride_b2,
    stride_bn,
    stride_o0,
    stride_o1,
    stride_o2,
    stride_on,
    out_kind,
    UNIT: tl.constexpr,
    A_INNER: tl.constexpr,
    B_INNER: tl.constexpr,
    OUT_INNER: tl.constexpr,
    OUTER_RANK: tl.constexpr,
    COMPUTE: tl.constexpr,
    IS_TYPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows of `n` elements, numbered over three dimensions. Grid: (row blocks × column blocks,).

    A whole block is moved without a mask, which is what lets the compiler move 16 bytes at a time for any `n`.
    """
    await_previous(OVERLAP)
    a = (a_ptr, (stride_a0, stride_a1, stride_a2), stride_an)
    b = (b_ptr, (stride_b0, stride_b1, stride_b2), stride_bn)
    out = ((stride_o0, stride_o1, stride_o2), stride_on)
    sizes = (extent_1, extent_2), (divisor_1, divisor_2, divisor_n)
    a, b, to_out, offs_n, mask, is_cut = place_tile(
        rows, n, sizes, is_narrow, a, b, out, UNIT, A_INNER, B_INNER, OUT_INNER, OUTER_RANK, BLOCK_ROWS, BLOCK_N
    )
    if not IS_TYPED or is_cut:
        add_tile(a, b, out_ptr, alpha, to_out, offs_n, mask, out_kind, A_INNER, B_INNER, COMPUTE, IS_TYPED)
    else:
        add_tile(a, b, out_ptr, alpha, to_out, offs_n, None, out_kind, A_INNER, B_INNER, COMPUTE, IS_TYPED)
