"""The softmax kernels: jit bodies only.

All compute out = e^(x - max) / Σ e^(x - max) along one dimension of N elements, in fp32.
With `log`, out = x - max - ln Σ e^(x - max). Rows are numbered over two dimensions (outer, inner) with one stride each.
About 5·rows·N flops; rows·N·(input size + output size) bytes at least.

A row of -inf, a +inf or a NaN gives NaN by the formula itself, as in PyTorch. Then the maximum is ±inf or NaN, and the
difference x - max is NaN somewhere. The maximum need not carry NaN, since e^NaN in the sum does.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.pdl import await_previous
from tilewire.kernels.softmax.groups import exchange, leave


@triton.jit
def row_offsets(row, rows_inner, stride_outer, stride_inner, UNIT: tl.constexpr):
    """Offset of the first element of each row, in elements; strides come in UNITs, by which they divide."""
    outer = (row // rows_inner).to(tl.int64)
    inner = (row % rows_inner).to(tl.int64)
    return (outer * stride_outer + inner * stride_inner) * UNIT


@triton.jit
def absorb(top, total, x):
    """The running (maximum, Σ e^(x - maximum)) of each lane after one more element.

    While a lane has seen only -inf its exponents are taken from 0, since -inf - -inf would be NaN.
    Source: the online normaliser of Milakov and Gimelshein, 2018.
    """
    new_top = tl.maximum(top, x)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    return new_top, total * tl.exp(top - base) + tl.exp(x - base)


@triton.jit
def merge_lanes(top, total, AXIS: tl.constexpr):
    """The (maximum, sum) of all lanes along AXIS from those of each."""
    all_top = tl.max(top, axis=AXIS, keep_dims=True)
    base = tl.where(all_top == -float("inf"), 0.0, all_top)
    return all_top, tl.sum(total * tl.exp(top - base), axis=AXIS, keep_dims=True)


@triton.jit
def normalise(x, top, total, log):
    """The result for `x` of a row with maximum `top` and Σ e^(x - top) = `total`; `log` is 0 or 1."""
    out = x - top
    if log > 0:
        out -= tl.log(total)
    else:
        out = tl.exp(out) * (1.0 / total)
    return out


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
    OVERLAP: tl.constexpr,
):
    """Rows whole in registers: one read, one write. Grid: (ceil(rows / BLOCK_ROWS),).

    A row has up to BLOCK_N + TAIL_N elements: lengths a little above a power of two do not pay for the next one.
    """
    await_previous(OVERLAP)
    n = n * UNIT
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    from_x = row_offsets(row, rows_inner, stride_xo, stride_xi, UNIT)[:, None]
    from_out = row_offsets(row, rows_inner, stride_oo, stride_oi, UNIT)[:, None]
    in_rows = (row < rows)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = in_rows & (offs_n < n)
    x = tl.load(x_ptr + from_x + offs_n, mask=mask, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=1, keep_dims=True)
    if TAIL_N > 0:
        offs_tail = BLOCK_N + tl.arange(0, TAIL_N)[None, :]
        in_tail = in_rows & (offs_tail < n)
        tail = tl.load(x_ptr + from_x + offs_tail, mask=in_tail, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(tail, axis=1, keep_dims=True))
    total = tl.sum(tl.exp(x - top), axis=1, keep_dims=True)
    if TAIL_N > 0:
        total += tl.sum(tl.exp(tail - top), axis=1, keep_dims=True)
    # The same number, which the compiler does not know: else it would hold rows twice, as they are and their exponentials.
    top = tl.where(log > 1, 0.0, top)
    if TAIL_N > 0:
        tl.store(
            out_ptr + from_out + offs_tail, normalise(tail, top, total, log).to(out_ptr.dtype.element_ty), mask=in_tail
        )
    tl.store(out_ptr + from_out + offs_n, normalise(x, top, total, log).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scan(x_ptr, first, last, BLOCK_N: tl.constexpr):
    """The (maximum, Σ e^(x - maximum)) of the elements from `first` to `last`, each of shape (1,)."""
    offs_n = tl.arange(0, BLOCK_N)
    top = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, last, BLOCK_N):
        offs = start + offs_n
        x = tl.load(x_ptr + offs, mask=offs < last, other=-float("inf")).to(tl.float32)
        top, total = absorb(top, total, x)
    return merge_lanes(top, total, 0)


@triton.jit
def write(x_ptr, out_ptr, first, last, top, total, log, BLOCK_N: tl.constexpr):
    """Store the results of the elements from `first` to `last` of a row with `top` and `total`."""
    offs_n = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        offs = start + offs_n
        x = tl.load(x_ptr + offs, mask=offs < last, other=-float("inf")).to(tl.float32)
        tl.store(out_ptr + offs, normalise(x, top, total, log).to(out_ptr.dtype.element_ty), mask=offs < last)


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
):
    """A long row read twice, the second time from L2 while it lasts. Grid: (rows,)."""
    await_previous(OVERLAP)
    n = n * UNIT
    row = tl.program_id(0)
    x_ptr += row_offsets(row, rows_inner, stride_xo, stride_xi, UNIT)
    out_ptr += row_offsets(row, rows_inner, stride_oo, stride_oi, UNIT)
    top, total = scan(x_ptr, 0, n, BLOCK_N)
    write(x_ptr, out_ptr, 0, n, top, total, log, BLOCK_N)


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
):
    """First half of a row split over programs: each part's maximum and sum. Grid: (rows, splits).

    `partial_ptr` is (rows, splits, 2) float32.
    """
    await_previous(OVERLAP)
    n = n * UNIT
    row = tl.program_id(0)
    part = tl.program_id(1)
    x_ptr += row_offsets(row, rows_inner, stride_xo, stride_xi, UNIT)
    first = part * blocks_per_split * BLOCK_N
    top, total = scan(x_ptr, first, tl.minimum(n, first + blocks_per_split * BLOCK_N), BLOCK_N)
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
    top, total = merge_lanes(tops, totals, 0)
    x_ptr += row_offsets(row, rows_inner, stride_xo, stride_xi, UNIT)
    out_ptr += row_offsets(row, rows_inner, stride_oo, stride_oi, UNIT)
    first = part * blocks_per_split * BLOCK_N
    last = tl.minimum(n, first + blocks_per_split * BLOCK_N)
    write(x_ptr, out_ptr, first, last, top, total, log, BLOCK_N)


@triton.jit
def softmax_column_kernel(
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows whose elements lie apart: neighbouring rows are read side by side. Grid: (ceil(rows / BLOCK_ROWS),)."""
    await_previous(OVERLAP)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    x_ptrs = x_ptr + row_offsets(row, rows_inner, stride_xo, stride_xi, 1)[None, :]
    out_ptrs = out_ptr + row_offsets(row, rows_inner, stride_oo, stride_oi, 1)[None, :]
    in_rows = (row < rows)[None, :]
    top = tl.full((BLOCK_N, BLOCK_ROWS), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
    for start in range(0, n, BLOCK_N):
        offs = (start + offs_n)[:, None]
        x = tl.load(x_ptrs + offs * stride_xn, mask=in_rows & (offs < n), other=-float("inf")).to(tl.float32)
        top, total = absorb(top, total, x)
    top, total = merge_lanes(top, total, 0)
    for start in range(0, n, BLOCK_N):
        offs = (start + offs_n)[:, None]
        mask = in_rows & (offs < n)
        x = tl.load(x_ptrs + offs * stride_xn, mask=mask, other=-float("inf")).to(tl.float32)
        tl.store(out_ptrs + offs * stride_on, normalise(x, top, total, log).to(out_ptr.dtype.element_ty), mask=mask)


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
        from_x = row_offsets(row, rows_inner, stride_xo, stride_xi, UNIT)
        x = tl.load(x_ptr + from_x + offs_n, mask=mask, other=-float("inf")).to(tl.float32)
        my_top = tl.max(x, axis=0)
        # A member may hold nothing but padding.
        base = tl.where(my_top == -float("inf"), 0.0, my_top)
        my_total = tl.sum(tl.exp(x - base), axis=0)
        tops, totals = exchange(
            partial_ptr, count_ptr, member, group_size, turn, my_top, my_total, -float("inf"), MAX_GROUP
        )
        turn += 1
        top, total = merge_lanes(tops, totals, 0)
        to_out = row_offsets(row, rows_inner, stride_oo, stride_oi, UNIT)
        tl.store(out_ptr + to_out + offs_n, normalise(x, top, total, log).to(out_ptr.dtype.element_ty), mask=mask)
    leave(count_ptr, group_size, turn)
