"""The reduction kernels: jit bodies only.

A reduction keeps a state of two 32-bit words a lane: a float32 sum, a maximum and a sum, or an order and an index.
Lanes merge in a fixed order. So do the parts of a row that several programs share, in the program that arrives last.
Thus a result has the same bits every time. At least rows·N·input size bytes.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.elements import store_floats
from tilewire.kernels.runtime.pdl import bring_up_next, wait_for_previous
from tilewire.kernels.softmax.kernel import row_offsets
from tilewire.kernels.topk.kernel import MAGNITUDE, NONE, index_of, to_key, to_order

# States. SUM is a sum, of squares with `power` 2. TOP is a maximum, NaN above all, of -x with `flip`. BEST is an order with
# the index of its element. EXP is a maximum and Σ e^(x - maximum).
SUM = tl.constexpr(0)
BEST = tl.constexpr(1)
EXP = tl.constexpr(2)
TOP = tl.constexpr(3)
# Results of a state, chosen at run time: see `configs.KINDS`.
MEAN = tl.constexpr(1)
NORM = tl.constexpr(2)


@triton.jit
def base_of(top):
    """Returns the subtrahend of exponents: the maximum, 0 for an infinite one, since ∞ - ∞ would be NaN."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def absorb_exp(top, total, x, AXIS: tl.constexpr):
    """The running (maximum, Σ e^(x - maximum)) of each lane after the elements of `x` along AXIS.

    Source: the online normaliser of Milakov and Gimelshein, 2018, here for several elements at a time.
    """
    new_top = tl.maximum(top, tl.max(x, axis=AXIS))
    base = base_of(new_top)
    parts = tl.sum(tl.exp(x - tl.expand_dims(base, AXIS)), axis=AXIS)
    return new_top, total * tl.exp(top - base) + parts


@triton.jit
def merge_exp(top, total, AXIS: tl.constexpr):
    """The (maximum, sum) of all lanes along AXIS."""
    all_top = tl.max(top, axis=AXIS)
    base = tl.expand_dims(base_of(all_top), AXIS)
    # A lane that saw nothing but -inf has the sum 0, or NaN, which must stay.
    scale = tl.exp(top - base)
    return all_top, tl.sum(total * scale, axis=AXIS)


@triton.jit
def larger(tops, x):
    """The larger of the two, NaN where one is."""
    return tl.maximum(tops, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(tops, AXIS: tl.constexpr):
    """The largest along AXIS, NaN where there is one."""
    return tl.reduce(tops, AXIS, larger)


@triton.jit
def is_better(x, tops):
    """Whether `x` is above `tops`, where NaN is above all and equal to itself."""
    return ~(x <= tops) & (tops == tops)


@triton.jit
def absorb_one(top, total, x):
    """The running (maximum, Σ e^(x - maximum)) of each lane after one element each: one of both exponents is 0."""
    part = tl.where(x == top, 1.0, tl.exp(-tl.abs(top - x)))
    return tl.maximum(top, x), tl.where(x > top, total * part + 1.0, total + part)


@triton.jit
def store_result(out_ptr, place, mask, first, second, n, kind, flip, out_kind, STATE: tl.constexpr):
    """Make the result of merged states and store it as `out_kind` says."""
    if STATE == BEST:
        tl.store(out_ptr.to(tl.pointer_type(tl.int64)) + place, second.to(tl.int64), mask=mask)
    elif STATE == TOP:
        store_floats(out_ptr, out_kind, place, tl.where(flip != 0, -first, first), mask)
    else:
        result = first
        if STATE == EXP:
            result = tl.log(second) + base_of(first)
        # Branches: roots and quotients of all results take longer than a small reduction.
        elif kind == NORM:
            result = tl.sqrt_rn(first)
        elif kind == MEAN:
            result = tl.div_rn(first, tl.zeros_like(first) + n)
        store_floats(out_ptr, out_kind, place, result, mask)


@triton.jit
def merge_parts(partial_ptr, row, in_rows, rows, parts, STATE: tl.constexpr):
    """The states of `row` from those of the programs that share it, `partial_ptr` (2, rows, parts) words."""
    ROWS: tl.constexpr = row.shape[0]
    # Parts at a time.
    STEP: tl.constexpr = 512 if ROWS <= 4 else 2048 // ROWS
    number = tl.arange(0, STEP)[None, :]
    from_row = row.to(tl.int64)[:, None] * parts
    second_ptr = partial_ptr + tl.cast(rows, tl.int64) * parts
    if STATE == BEST:
        keys = tl.full((ROWS, STEP), NONE, tl.int64)
    else:
        firsts = tl.full((ROWS, STEP), 0.0 if STATE == SUM else -float("inf"), tl.float32)
        seconds = tl.zeros((ROWS, STEP), tl.float32)
    for start in range(0, parts, STEP):
        mask = in_rows[:, None] & (start + number < parts)
        place = from_row + start + number
        # Other programs wrote them: not from this one's cache.
        words = tl.load(partial_ptr + place, mask=mask, other=0, cache_modifier=".cg")
        if STATE == SUM:
            firsts += words.to(tl.float32, bitcast=True)
        elif STATE == TOP:
            firsts = larger(firsts, tl.where(mask, words.to(tl.float32, bitcast=True), -float("inf")))
        else:
            others = tl.load(second_ptr + place, mask=mask, other=0, cache_modifier=".cg")
            if STATE == BEST:
                keys = tl.maximum(keys, tl.where(mask, to_key(words, others), NONE))
            else:
                tops = tl.where(mask, words.to(tl.float32, bitcast=True), -float("inf"))
                new_tops = tl.maximum(firsts, tops)
                base = base_of(new_tops)
                seconds = seconds * tl.exp(firsts - base) + others.to(tl.float32, bitcast=True) * tl.exp(tops - base)
                firsts = new_tops
    if STATE == SUM:
        first = tl.sum(firsts, axis=1)
        second = first
    elif STATE == TOP:
        first = largest(firsts, 1)
        second = first
    elif STATE == EXP:
        first, second = merge_exp(firsts, seconds, 1)
    else:
        key = tl.max(keys, axis=1)
        first = (key >> 32).to(tl.int32)
        second = index_of(key).to(tl.int32)
    return first, second


@triton.jit
def finish(
    first,
    second,
    row,
    in_rows,
    rows,
    parts,
    out_ptr,
    partial_ptr,
    count_ptr,
    n,
    kind,
    flip,
    out_kind,
    STATE: tl.constexpr,
):
    """Store the result of each row; where `parts` programs share rows, in the one that arrives last.

    Each of those stores its states, then counts itself. The last one puts the counter back to 0.
    """
    if parts > 1:
        place = row.to(tl.int64) * parts + tl.program_id(0) % parts
        tl.store(partial_ptr + place, first.to(tl.int32, bitcast=True), mask=in_rows)
        if STATE == BEST or STATE == EXP:  # noqa: SIM109
            second_ptr = partial_ptr + tl.cast(rows, tl.int64) * parts
            tl.store(second_ptr + place, second.to(tl.int32, bitcast=True), mask=in_rows)
        # Every thread's states must be visible before one thread announces them.
        tl.debug_barrier()
        to_count = count_ptr + tl.program_id(0) // parts
        is_last = tl.atomic_add(to_count, 1, sem="acq_rel", scope="gpu") == parts - 1
        in_rows = in_rows & is_last
        first, second = merge_parts(partial_ptr, row, in_rows, rows, tl.where(is_last, parts, 0), STATE)
        tl.store(to_count, 0, mask=is_last)
    store_result(out_ptr, row, in_rows, first, second, n, kind, flip, out_kind, STATE)


@triton.jit
def begin(parts, OVERLAP: tl.constexpr):
    """Wait for the previous kernel. Programs that share rows bring up the next one before they merge, others at once."""
    if parts == 1:
        bring_up_next(OVERLAP)
    wait_for_previous(OVERLAP)


@triton.jit
def load_block(row_ptrs, place, in_rows, start, offs, n, nothing, PIECE: tl.constexpr, CUT: tl.constexpr):
    """The elements of rows at `start` + `offs` as float32; what is not of a row is `nothing`.

    A row begins at `place`, and pieces are read whole. Unless CUT, rows begin and end where a piece does.
    """
    end = n - start
    if CUT:
        end = (end + place)[:, None]
    mask = in_rows[:, None] & (offs // PIECE * PIECE < end)
    x = tl.load(row_ptrs + (start + offs), mask=mask, other=nothing).to(tl.float32)
    if CUT:
        x = tl.where((offs >= (place - start)[:, None]) & (offs < end), x, nothing)
    return x


@triton.jit
def reduce_row_kernel(
    x_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    rows,
    n,
    blocks,
    rows_inner,
    stride_outer,
    stride_inner,
    parts,
    kind,
    flip,
    power,
    out_kind,
    PIECE: tl.constexpr,
    CUT: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows of neighbours. Grid: (ceil(rows / BLOCK_ROWS) × parts,).

    The programs of a row take its `blocks` of BLOCK_N elements in turn, LANE neighbours a lane: together they read from one
    place of memory. Rows are read in whole pieces of PIECE elements, 16 bytes. With CUT they begin and end anywhere, and what
    lies around a row is not used: a piece that holds an element lies in that element's memory. A PIECE of 1 reads element
    by element.
    """
    begin(parts, OVERLAP)
    NUM: tl.constexpr = BLOCK_N // LANE
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    part = tl.program_id(0) % parts
    first_row = tl.program_id(0) // parts * BLOCK_ROWS
    lane = tl.arange(0, BLOCK_ROWS)
    row = first_row + lane
    in_rows = row < rows
    from_row = row_offsets(first_row, lane, rows_inner, stride_outer, stride_inner, BLOCK_ROWS, 1)
    # Where a row begins, counted from the piece that the first one begins in.
    place = tl.zeros((BLOCK_ROWS,), tl.int32)
    first_ptr = x_ptr
    if PIECE > 1:
        address = x_ptr.to(tl.int64)
        first_ptr = tl.multiple_of((address & -16).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    if CUT:
        from_row += (address & 15) // SIZE
        place = (from_row % PIECE).to(tl.int32)
    row_ptrs = first_ptr + (from_row // PIECE * PIECE)[:, None]
    offs = tl.arange(0, BLOCK_N)[None, :]
    sign = tl.where(flip != 0, -1.0, 1.0)
    if STATE == SUM:
        total = tl.zeros((BLOCK_ROWS, NUM), tl.float32)
        for block in range(part, blocks, parts):
            x = load_block(row_ptrs, place, in_rows, block * BLOCK_N, offs, n, 0.0, PIECE, CUT)
            x = tl.where(power == 2, x * x, x)
            total += tl.sum(tl.reshape(x, (BLOCK_ROWS, NUM, LANE)), axis=2)
        first = tl.sum(total, axis=1)
        second = first
    elif STATE == EXP:
        tops = tl.full((BLOCK_ROWS, NUM), -float("inf"), tl.float32)
        totals = tl.zeros((BLOCK_ROWS, NUM), tl.float32)
        for block in range(part, blocks, parts):
            x = load_block(row_ptrs, place, in_rows, block * BLOCK_N, offs, n, -float("inf"), PIECE, CUT)
            tops, totals = absorb_exp(tops, totals, tl.reshape(x, (BLOCK_ROWS, NUM, LANE)), 2)
        first, second = merge_exp(tops, totals, 1)
    elif STATE == TOP:
        tops = tl.full((BLOCK_ROWS, NUM), -float("inf"), tl.float32)
        for block in range(part, blocks, parts):
            x = load_block(row_ptrs, place, in_rows, block * BLOCK_N, offs, n, -float("inf") * sign, PIECE, CUT) * sign
            tops = larger(tops, largest(tl.reshape(x, (BLOCK_ROWS, NUM, LANE)), 2))
        first = largest(tops, 1)
        second = first
    else:
        tops = tl.full((BLOCK_ROWS, NUM), -float("inf"), tl.float32)
        starts = tl.zeros((BLOCK_ROWS, NUM), tl.int32) + part * BLOCK_N
        for block in range(part, blocks, parts):
            start = block * BLOCK_N
            x = load_block(row_ptrs, place, in_rows, start, offs, n, -float("inf") * sign, PIECE, CUT) * sign
            x = largest(tl.reshape(x, (BLOCK_ROWS, NUM, LANE)), 2)
            is_new = is_better(x, tops)
            starts = tl.where(is_new, start, starts)
            tops = tl.where(is_new, x, tops)
        # The first lane with the best element, then its first element that is equal.
        key = tl.max(to_key(to_order(tops, 0, MAGNITUDE), starts + tl.arange(0, NUM)[None, :] * LANE), axis=1)
        first = (key >> 32).to(tl.int32)
        near = index_of(key)[:, None] + tl.arange(0, LANE)[None, :]
        index = near - place[:, None]
        mask = in_rows[:, None] & (index >= 0) & (index < n)
        x = tl.load(row_ptrs + near, mask=mask, other=0.0).to(tl.float32) * sign
        is_best = mask & (to_order(x, 0, MAGNITUDE) == first[:, None])
        second = tl.min(tl.where(is_best, index, MAGNITUDE), axis=1).to(tl.int32)
    if parts > 1:
        bring_up_next(OVERLAP)
    finish(first, second, row, in_rows, rows, parts, out_ptr, partial_ptr, count_ptr, n, kind, flip, out_kind, STATE)


@triton.jit
def reduce_column_kernel(
    x_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    rows,
    n,
    rows_inner,
    stride_outer,
    stride_inner,
    stride_n,
    parts,
    kind,
    flip,
    power,
    out_kind,
    UNIT: tl.constexpr,
    STATE: tl.constexpr,
    UNIT_INNER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows whose elements lie apart: neighbouring rows are read side by side. Grid: (ceil(rows / BLOCK_ROWS) × parts,).

    `rows` and `rows_inner`, of which there are `rows` / `rows_inner` runs, come in UNITs, and so do strides but those of
    rows that are no neighbours (not UNIT_INNER). The programs of a row take its blocks of BLOCK_N elements in turn. A
    thread reads LANE elements of a row at a time.
    """
    begin(parts, OVERLAP)
    NUM: tl.constexpr = BLOCK_N // LANE
    rows = rows * UNIT
    rows_inner = rows_inner * UNIT
    part = tl.program_id(0) % parts
    row = tl.program_id(0) // parts * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = row < rows
    outer = row // rows_inner
    inner = row % rows_inner
    from_row = outer.to(tl.int64) * (stride_outer * UNIT) + (inner if UNIT_INNER else inner.to(tl.int64) * stride_inner)
    x_ptrs = x_ptr + from_row[None, :]
    # Not counted in elements, which may come near 2³¹.
    blocks = (n - 1) // BLOCK_N + 1
    offs = tl.arange(0, NUM)[:, None]
    stride_n = stride_n * UNIT
    x_ptrs += (part * BLOCK_N + offs).to(tl.int64) * stride_n
    step_lane = NUM * tl.cast(stride_n, tl.int64)
    skipped = (parts - 1) * BLOCK_N * tl.cast(stride_n, tl.int64)
    sign = tl.where(flip != 0, -1.0, 1.0)
    nothing = 0.0 if STATE == SUM else -float("inf") * sign
    firsts = tl.full((NUM, BLOCK_ROWS), 0.0 if STATE == SUM else -float("inf"), tl.float32)
    totals = tl.zeros((NUM, BLOCK_ROWS), tl.float32)
    places = tl.zeros((NUM, BLOCK_ROWS), tl.int32) + part * BLOCK_N
    for block in range(part, blocks, parts):
        start = block * BLOCK_N
        for lane in tl.static_range(LANE):
            mask = in_rows[None, :] & (offs < n - start - lane * NUM)
            x = tl.load(x_ptrs, mask=mask, other=nothing).to(tl.float32)
            x_ptrs += step_lane
            if STATE == SUM:
                firsts += tl.where(power == 2, x * x, x)
            elif STATE == EXP:
                firsts, totals = absorb_one(firsts, totals, x)
            elif STATE == TOP:
                firsts = larger(firsts, x * sign)
            else:
                is_new = is_better(x * sign, firsts)
                places = tl.where(is_new, start + lane * NUM, places)
                firsts = tl.where(is_new, x * sign, firsts)
        x_ptrs += skipped
    if STATE == SUM:
        first = tl.sum(firsts, axis=0)
        second = first
    elif STATE == EXP:
        first, second = merge_exp(firsts, totals, 0)
    elif STATE == TOP:
        first = largest(firsts, 0)
        second = first
    else:
        key = tl.max(to_key(to_order(firsts, 0, MAGNITUDE), places + offs), axis=0)
        first = (key >> 32).to(tl.int32)
        second = index_of(key).to(tl.int32)
    if parts > 1:
        bring_up_next(OVERLAP)
    finish(first, second, row, in_rows, rows, parts, out_ptr, partial_ptr, count_ptr, n, kind, flip, out_kind, STATE)
