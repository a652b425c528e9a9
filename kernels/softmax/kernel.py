"""The softmax kernels: jit bodies only.

All compute out = e^(x - max) / Σ e^(x - max) along one dimension of N elements, in fp32.
With `log`, out = x - max - ln Σ e^(x - max). Rows are numbered over two dimensions (outer, inner) with one stride each.
About 5·rows·N flops; rows·N·(input size + output size) bytes at least.

A row of -inf, a +inf or a NaN gives NaN by the formula itself, as in PyTorch. Then the maximum is ±inf or NaN, and the
difference x - max is NaN somewhere. The maximum need not carry NaN, since e^NaN in the sum does.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.elements import wrapped
from tilewire.kernels.runtime.pdl import await_previous
from tilewire.kernels.softmax.groups import exchange, leave

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x, IN_PTX: tl.constexpr):
    """e^x as 2^(x log₂ e); NaN stays NaN. The error is 2^-22 of the result and, as that of the product is, 2^-24 |x|.

    The compiler's own takes four instructions on NVIDIA's GPUs, three of them for results below 2^-126. With IN_PTX such
    results are 0 and one instruction is left, which short rows feel.
    """
    power = x * _LOG2_E
    if IN_PTX:
        result = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.exp2(power)
    return result


@triton.jit
def row_offsets(first, lane, rows_inner, stride_outer, stride_inner, ROWS: tl.constexpr, UNIT: tl.constexpr):
    """Offsets of the first elements of the rows `first` + `lane`, in elements; `first` is a scalar, `lane` is below ROWS.

    Strides come in UNITs, by which they divide, as int64. Where there is one outer row, as in a matrix, nothing is divided:
    that takes longer than a short row does. Else `first` is divided, once a program.
    """
    offsets = (first + lane) * stride_inner
    if first + ROWS > rows_inner:
        outer = first // rows_inner
        inner = first - outer * rows_inner + lane
        if ROWS > 1:
            more, inner = wrapped(inner, rows_inner, ROWS)
            outer += more
        offsets = outer * stride_outer + inner * stride_inner
    return offsets * UNIT


@triton.jit
def absorb(top, total, x, IN_PTX: tl.constexpr):
    """The running (maximum, Σ e^(x - maximum)) of each lane after one more element.

    While a lane has seen only -inf its exponents are taken from 0, since -inf - -inf would be NaN.
    Source: the online normaliser of Milakov and Gimelshein, 2018.
    """
    new_top = tl.maximum(top, x)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    return new_top, total * exp(top - base, IN_PTX) + exp(x - base, IN_PTX)


@triton.jit
def merge_lanes(top, total, AXIS: tl.constexpr, IN_PTX: tl.constexpr):
    """The (maximum, sum) of all lanes along AXIS from those of each."""
    all_top = tl.max(top, axis=AXIS, keep_dims=True)
    base = tl.where(all_top == -float("inf"), 0.0, all_top)
    return all_top, tl.sum(total * exp(top - base, IN_PTX), axis=AXIS, keep_dims=True)


@triton.jit
def normalise(x, top, total, log, IN_PTX: tl.constexpr):
    """The result for `x` of a row with maximum `top` and Σ e^(x - top) = `total`; `log` is 0 or 1."""
    out = x - top
    if log > 0:
        out -= tl.log(total)
    else:
        out = exp(out, IN_PTX) * (1.0 / total)
    return out


@triton.jit
def top_of(x, ROWS: tl.constexpr):
    """The maximum of each of ROWS rows, (ROWS,). `x` has their steps one after the other: (steps × ROWS, lanes)."""
    x = tl.reshape(x, (x.shape[0] // ROWS, ROWS, x.shape[1]))
    return tl.max(tl.max(x, axis=0), axis=1)


@triton.jit
def total_of(x, ROWS: tl.constexpr):
    """The sum of each of ROWS rows; see `top_of`."""
    x = tl.reshape(x, (x.shape[0] // ROWS, ROWS, x.shape[1]))
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def to_steps(of_rows, STEPS: tl.constexpr):
    """Repeats one number a row, (ROWS,), for each of its steps: (STEPS × ROWS, 1)."""
    ROWS: tl.constexpr = of_rows.shape[0]
    return tl.reshape(tl.broadcast_to(of_rows[None, :, None], (STEPS, ROWS, 1)), (STEPS * ROWS, 1))


@triton.jit
def numbers_of(start, ROWS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr):
    """The rows from 0 and the elements from `start` of the steps that `top_of` takes: (STEPS × ROWS,) and with lanes."""
    number = tl.arange(0, STEPS * ROWS)
    return number % ROWS, (start + number // ROWS * LANES)[:, None] + tl.arange(0, LANES)[None, :]


@triton.jit
def softmax_row_kernel(
    x_ptr,
    out_ptr,
    rows,
    n,
    rows_inner,
    stride_xo,
    stride_xi,
    stride_oo,
    stride_oi,
    log,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    LANES: tl.constexpr,
    TAIL_LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """Rows whole in registers: one read, one write. Grid: (ceil(rows / BLOCK_ROWS),).

    A row has up to BLOCK_N + TAIL_N elements: lengths a little above a power of two do not pay for the next one. LANES
    neighbours are read in one step, TAIL_LANES of the tail. So many that a thread has one row: else each of its rows would
    need an address, a maximum and a sum of its own, which is most of the work where rows are short.
    """
    await_previous(OVERLAP)
    n = n * UNIT
    STEPS: tl.constexpr = BLOCK_N // LANES
    first = tl.program_id(0) * BLOCK_ROWS
    row, offs_n = numbers_of(0, BLOCK_ROWS, STEPS, LANES)
    x_ptrs = x_ptr + row_offsets(first, row, rows_inner, stride_xo, stride_xi, BLOCK_ROWS, UNIT)[:, None] + offs_n
    out_ptrs = out_ptr + row_offsets(first, row, rows_inner, stride_oo, stride_oi, BLOCK_ROWS, UNIT)[:, None] + offs_n
    mask = (first + row < rows)[:, None] & (offs_n < n)
    x = tl.load(x_ptrs, mask=mask, other=-float("inf")).to(tl.float32)
    top = top_of(x, BLOCK_ROWS)
    if TAIL_N > 0:
        TAIL_STEPS: tl.constexpr = TAIL_N // TAIL_LANES
        row, offs_n = numbers_of(BLOCK_N, BLOCK_ROWS, TAIL_STEPS, TAIL_LANES)
        tail_ptrs = (
            x_ptr + row_offsets(first, row, rows_inner, stride_xo, stride_xi, BLOCK_ROWS, UNIT)[:, None] + offs_n
        )
        to_tail = (
            out_ptr + row_offsets(first, row, rows_inner, stride_oo, stride_oi, BLOCK_ROWS, UNIT)[:, None] + offs_n
        )
        in_tail = (first + row < rows)[:, None] & (offs_n < n)
        tail = tl.load(tail_ptrs, mask=in_tail, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, top_of(tail, BLOCK_ROWS))
    # Two ways, so that a row is held once: as it is for the logarithm, as its exponentials otherwise. The first has other
    # exponentials, lest the compiler take them out of both.
    tops = to_steps(top, STEPS)
    if log > 0:
        total = total_of(tl.exp(x - tops), BLOCK_ROWS)
        if TAIL_N > 0:
            tail_tops = to_steps(top, TAIL_STEPS)
            total += total_of(tl.exp(tail - tail_tops), BLOCK_ROWS)
            out = tail - tail_tops - to_steps(tl.log(total), TAIL_STEPS)
            tl.store(to_tail, out.to(out_ptr.dtype.element_ty), mask=in_tail)
        out = x - tops - to_steps(tl.log(total), STEPS)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        x = exp(x - tops, IN_PTX)
        total = total_of(x, BLOCK_ROWS)
        if TAIL_N > 0:
            tail = exp(tail - to_steps(top, TAIL_STEPS), IN_PTX)
            total += total_of(tail, BLOCK_ROWS)
            out = tail * to_steps(1.0 / total, TAIL_STEPS)
            tl.store(to_tail, out.to(out_ptr.dtype.element_ty), mask=in_tail)
        out = x * to_steps(1.0 / total, STEPS)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scan(x_ptr, first, last, BLOCK_N: tl.constexpr, IN_PTX: tl.constexpr):
    """The (maximum, Σ e^(x - maximum)) of the elements from `first` to `last`, each of shape (1,)."""
    offs_n = tl.arange(0, BLOCK_N)
    top = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, last, BLOCK_N):
        offs = start + offs_n
        x = tl.load(x_ptr + offs, mask=offs < last, other=-float("inf")).to(tl.float32)
        top, total = absorb(top, total, x, IN_PTX)
    return merge_lanes(top, total, 0, IN_PTX)


@triton.jit
def write(x_ptr, out_ptr, first, last, top, total, log, BLOCK_N: tl.constexpr, IN_PTX: tl.constexpr):
    """Store the results of the elements from `first` to `last` of a row with `top` and `total`."""
    offs_n = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        offs = start + offs_n
        x = tl.load(x_ptr + offs, mask=offs < last, other=-float("inf")).to(tl.float32)
        tl.store(out_ptr + offs, normalise(x, top, total, log, IN_PTX).to(out_ptr.dtype.element_ty), mask=offs < last)


@triton.jit
def softmax_loop_kernel(
    x_ptr,
    out_ptr,
    n,
    rows_inner,
    stride_xo,
    stride_xi,
    stride_oo,
    stride_oi,
    log,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """A long row read twice, the second time from L2 while it lasts. Grid: (rows,)."""
    await_previous(OVERLAP)
    n = n * UNIT
    row = tl.program_id(0)
    x_ptr += row_offsets(row, 0, rows_inner, stride_xo, stride_xi, 1, UNIT)
    out_ptr += row_offsets(row, 0, rows_inner, stride_oo, stride_oi, 1, UNIT)
    top, total = scan(x_ptr, 0, n, BLOCK_N, IN_PTX)
    write(x_ptr, out_ptr, 0, n, top, total, log, BLOCK_N, IN_PTX)


@triton.jit
def softmax_partial_kernel(
    x_ptr,
    partial_ptr,
    n,
    rows_inner,
    stride_xo,
    stride_xi,
    blocks_per_split,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """First half of a row split over programs: each part's maximum and sum. Grid: (rows, splits).

    `partial_ptr` is (rows, splits, 2) float32.
    """
    await_previous(OVERLAP)
    n = n * UNIT
    row = tl.program_id(0)
    part = tl.program_id(1)
    x_ptr += row_offsets(row, 0, rows_inner, stride_xo, stride_xi, 1, UNIT)
    first = part * blocks_per_split * BLOCK_N
    top, total = scan(x_ptr, first, tl.minimum(n, first + blocks_per_split * BLOCK_N), BLOCK_N, IN_PTX)
    place = partial_ptr + (row.to(tl.int64) * tl.num_programs(1) + part) * 2 + tl.arange(0, 1)
    tl.store(place, top)
    tl.store(place + 1, total)


@triton.jit
def softmax_apply_kernel(
    x_ptr,
    out_ptr,
    partial_ptr,
    n,
    rows_inner,
    stride_xo,
    stride_xi,
    stride_oo,
    stride_oi,
    blocks_per_split,
    log,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """Second half: every program merges the parts of its row and writes one of them. Grid: (rows, splits)."""
    await_previous(OVERLAP)
    n = n * UNIT
    row = tl.program_id(0)
    part = tl.program_id(1)
    splits = tl.num_programs(1)
    others = tl.arange(0, MAX_SPLITS)
    place = partial_ptr + (row.to(tl.int64) * splits + others) * 2
    tops = tl.load(place, mask=others < splits, other=-float("inf"))
    totals = tl.load(place + 1, mask=others < splits, other=0.0)
    top, total = merge_lanes(tops, totals, 0, IN_PTX)
    x_ptr += row_offsets(row, 0, rows_inner, stride_xo, stride_xi, 1, UNIT)
    out_ptr += row_offsets(row, 0, rows_inner, stride_oo, stride_oi, 1, UNIT)
    first = part * blocks_per_split * BLOCK_N
    last = tl.minimum(n, first + blocks_per_split * BLOCK_N)
    write(x_ptr, out_ptr, first, last, top, total, log, BLOCK_N, IN_PTX)


@triton.jit
def softmax_across_kernel(
    x_ptr,
    out_ptr,
    rows,
    n,
    rows_inner,
    stride_xo,
    stride_xi,
    stride_xn,
    stride_oo,
    stride_oi,
    stride_on,
    log,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """Rows whose elements lie apart, read side by side. Grid: (ceil(rows / BLOCK_ROWS),).

    Rows are last in a tile: so the compiler gives neighbouring lanes neighbouring rows. A UNIT above 1 is how many of them lie
    in one piece of memory: `rows`, `rows_inner` and strides but those from row to row come in UNITs, and rows are held whole,
    n ≤ BLOCK_N. Else they are read twice.
    """
    await_previous(OVERLAP)
    rows *= UNIT
    rows_inner *= UNIT
    first = tl.program_id(0) * BLOCK_ROWS
    lane = tl.arange(0, BLOCK_ROWS)
    offs_n = tl.arange(0, BLOCK_N)[:, None]
    x_row = row_offsets(first, lane, rows_inner, stride_xo * UNIT, stride_xi, BLOCK_ROWS, 1)[None, :]
    out_row = row_offsets(first, lane, rows_inner, stride_oo * UNIT, stride_oi, BLOCK_ROWS, 1)[None, :]
    from_x = x_row + offs_n * (stride_xn * UNIT)
    to_out = out_row + offs_n * (stride_on * UNIT)
    in_rows = (first + lane < rows)[None, :]
    if UNIT > 1:
        from_x = tl.max_contiguous(tl.multiple_of(from_x, (1, UNIT)), (1, UNIT))
        to_out = tl.max_contiguous(tl.multiple_of(to_out, (1, UNIT)), (1, UNIT))
        mask = in_rows & (offs_n < n)
        x = tl.load(x_ptr + from_x, mask=mask, other=-float("inf")).to(tl.float32)
        store_held(out_ptr + to_out, x, mask, log, IN_PTX)
    else:
        walk_across(x_ptr + from_x, out_ptr + to_out, n, stride_xn, stride_on, offs_n, in_rows, log, IN_PTX)


@triton.jit
def store_held(out_ptrs, x, mask, log, IN_PTX: tl.constexpr):
    """Store the results of the columns `x`, (elements, rows)."""
    x -= tl.max(x, axis=0, keep_dims=True)
    # Two ways, as in `softmax_row_kernel`.
    if log > 0:
        x -= tl.log(tl.sum(tl.exp(x), axis=0, keep_dims=True))
        tl.store(out_ptrs, x.to(out_ptrs.dtype.element_ty), mask=mask)
    else:
        x = exp(x, IN_PTX)
        x *= 1.0 / tl.sum(x, axis=0, keep_dims=True)
        tl.store(out_ptrs, x.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def walk_across(x_first, out_first, n, stride_xn, stride_on, offs_n, in_rows, log, IN_PTX: tl.constexpr):
    """Softmax of rows of `n` elements from `x_first` to `out_first`, pointers to their first elements, (elements, rows)."""
    BLOCK_N: tl.constexpr = x_first.shape[0]
    BLOCK_ROWS: tl.constexpr = x_first.shape[1]
    top = tl.full((BLOCK_N, BLOCK_ROWS), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
    x_ptrs = x_first
    for start in range(0, n, BLOCK_N):
        x = tl.load(x_ptrs, mask=in_rows & (start + offs_n < n), other=-float("inf")).to(tl.float32)
        top, total = absorb(top, total, x, IN_PTX)
        x_ptrs += stride_xn * BLOCK_N
    top, total = merge_lanes(top, total, 0, IN_PTX)
    x_ptrs = x_first
    out_ptrs = out_first
    for start in range(0, n, BLOCK_N):
        mask = in_rows & (start + offs_n < n)
        x = tl.load(x_ptrs, mask=mask, other=-float("inf")).to(tl.float32)
        tl.store(out_ptrs, normalise(x, top, total, log, IN_PTX).to(out_ptrs.dtype.element_ty), mask=mask)
        x_ptrs += stride_xn * BLOCK_N
        out_ptrs += stride_on * BLOCK_N


@triton.jit
def softmax_cooperative_kernel(
    x_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    rows,
    n,
    rows_inner,
    stride_xo,
    stride_xi,
    stride_oo,
    stride_oi,
    group_size,
    log,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """A long row held in the registers of a group of programs, so that it is read once. Grid: (groups × group_size,).

    The members of a group exchange (maximum, sum) once a row. See `groups.exchange` for `partial_ptr` and `count_ptr`.
    """
    await_previous(OVERLAP)
    n = n * UNIT
    group = tl.program_id(0) // group_size
    member = tl.program_id(0) % group_size
    num_groups = tl.num_programs(0) // group_size
    offs_n = member * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < n
    partial_ptr += group * (4 * group_size)
    count_ptr += group
    turn = 0
    for row in tl.range(group, rows, num_groups):
        from_x = row_offsets(row, 0, rows_inner, stride_xo, stride_xi, 1, UNIT)
        x = tl.load(x_ptr + from_x + offs_n, mask=mask, other=-float("inf")).to(tl.float32)
        my_top = tl.max(x, axis=0)
        # A member may hold nothing but padding.
        base = tl.where(my_top == -float("inf"), 0.0, my_top)
        my_total = tl.sum(exp(x - base, IN_PTX), axis=0)
        tops, totals = exchange(
            partial_ptr, count_ptr, member, group_size, turn, my_top, my_total, -float("inf"), MAX_GROUP
        )
        turn += 1
        top, total = merge_lanes(tops, totals, 0, IN_PTX)
        out = normalise(x, top, total, log, IN_PTX)
        to_out = row_offsets(row, 0, rows_inner, stride_oo, stride_oi, 1, UNIT)
        tl.store(out_ptr + to_out + offs_n, out.to(out_ptr.dtype.element_ty), mask=mask)
    leave(count_ptr, group_size, turn)
