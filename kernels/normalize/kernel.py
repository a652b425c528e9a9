"""The normalisation kernels: jit bodies only.

All compute out = (x - mean) · scale · weight + bias along rows of N elements, in float32. The kind is passed at run time.
About 8·rows·N flops; rows·N·(input size + output size) bytes at least.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.pdl import await_previous
from tilewire.kernels.softmax.groups import exchange, leave
from tilewire.kernels.softmax.kernel import row_offsets

# Kinds, numbered as in `op.KINDS`.
LAYER = tl.constexpr(0)
RMS = tl.constexpr(1)


@triton.jit
def mean_of(total, n):
    """Total / n, rounded once: equal elements are their mean, if their sum is exact."""
    return tl.div_rn(total, tl.zeros_like(total) + n)


@triton.jit
def scale_of(square, n, eps, kind):
    """Computes the factor of a row from its sum of squares: 1/√(mean + eps), or 1/max(norm, eps) for the 2-norm."""
    eps = tl.cast(eps, tl.float32)
    root = tl.sqrt_rn(tl.where(kind <= RMS, square / n + eps, square))
    root = tl.where(kind <= RMS, root, tl.where(root < eps, eps, root))
    return tl.div_rn(tl.zeros_like(root) + 1.0, root)


@triton.jit
def store_row(out_ptrs, x, mean, scale, vectors, offs, mask, in_n):
    """Store (x - mean) · scale · weight + bias; an absent weight is 1, an absent bias 0.

    `vectors` is (weight_ptr, bias_ptr, has_weight, has_bias).
    """
    weight_ptr, bias_ptr, has_weight, has_bias = vectors
    weight = tl.load(weight_ptr + offs, mask=in_n & (has_weight > 0), other=1.0).to(tl.float32)
    bias = tl.load(bias_ptr + offs, mask=in_n & (has_bias > 0), other=0.0).to(tl.float32)
    tl.store(out_ptrs, ((x - mean) * scale * weight + bias).to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def normalize_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    n,
    stride_xi,
    stride_oi,
    eps,
    kind,
    has_weight,
    has_bias,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows whole in registers: one read, one write. Grid: (ceil(rows / BLOCK_ROWS),)."""
    await_previous(OVERLAP)
    n = n * UNIT
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs = tl.arange(0, BLOCK_N)[None, :]
    in_n = offs < n
    mask = (row < rows)[:, None] & in_n
    from_x = row.to(tl.int64)[:, None] * (stride_xi * UNIT)
    x = tl.load(x_ptr + from_x + offs, mask=mask, other=0.0).to(tl.float32)
    mean = tl.zeros((BLOCK_ROWS,), tl.float32)
    if kind == LAYER:
        mean = mean_of(tl.sum(x, axis=1), n)
    gap = tl.where(mask, x - mean[:, None], 0.0)
    scale = scale_of(tl.sum(gap * gap, axis=1), n, eps, kind)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * (stride_oi * UNIT) + offs
    vectors = (weight_ptr, bias_ptr, has_weight, has_bias)
    store_row(out_ptrs, x, mean[:, None], scale[:, None], vectors, offs, mask, in_n)


@triton.jit
def normalize_across_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
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
    eps,
    kind,
    has_weight,
    has_bias,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows whose elements lie apart, read side by side, held or walked. Grid: (ceil(rows / BLOCK_ROWS),).

    UNIT is as in `softmax_across_kernel`. Rows that are not held are read two or three times.
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
    in_rows = (first + lane < rows)[None, :]
    if UNIT > 1:
        from_x = tl.max_contiguous(tl.multiple_of(from_x, (1, UNIT)), (1, UNIT))
        in_n = offs_n < n
        mask = in_rows & in_n
        x = tl.load(x_ptr + from_x, mask=mask, other=0.0).to(tl.float32)
        mean = tl.zeros((1, BLOCK_ROWS), tl.float32)
        if kind == LAYER:
            mean = mean_of(tl.sum(x, axis=0, keep_dims=True), n)
        gap = tl.where(mask, x - mean, 0.0)
        scale = scale_of(tl.sum(gap * gap, axis=0, keep_dims=True), n, eps, kind)
        x = (x - mean) * scale
        # One after the other: both would not fit into registers.
        if has_weight > 0:
            x *= tl.load(weight_ptr + offs_n, mask=in_n, other=1.0).to(tl.float32)
        if has_bias > 0:
            x += tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
        to_out = out_row + offs_n * (stride_on * UNIT)
        to_out = tl.max_contiguous(tl.multiple_of(to_out, (1, UNIT)), (1, UNIT))
        tl.store(out_ptr + to_out, x.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        vectors = (weight_ptr, bias_ptr, has_weight, has_bias)
        steps = (n, stride_xn, stride_on)
        to_out = out_row + offs_n * stride_on
        walk_across(x_ptr + from_x, out_ptr + to_out, steps, eps, kind, vectors, offs_n, in_rows)


@triton.jit
def walk_across(x_first, out_first, steps, eps, kind, vectors, offs_n, in_rows):
    """Normalise rows from `x_first` to `out_first`, pointers to their first elements, (elements, rows).

    `steps` is (n, distance of elements of x, that of the output).
    """
    n, stride_xn, stride_on = steps
    BLOCK_N: tl.constexpr = x_first.shape[0]
    BLOCK_ROWS: tl.constexpr = x_first.shape[1]
    mean = tl.zeros((1, BLOCK_ROWS), tl.float32)
    if kind == LAYER:
        total = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
        x_ptrs = x_first
        for start in range(0, n, BLOCK_N):
            total += tl.load(x_ptrs, mask=in_rows & (start + offs_n < n), other=0.0).to(tl.float32)
            x_ptrs += stride_xn * BLOCK_N
        mean = mean_of(tl.sum(total, axis=0, keep_dims=True), n)
    squares = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
    x_ptrs = x_first
    for start in range(0, n, BLOCK_N):
        mask = in_rows & (start + offs_n < n)
        gap = tl.where(mask, tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32) - mean, 0.0)
        squares += gap * gap
        x_ptrs += stride_xn * BLOCK_N
    scale = scale_of(tl.sum(squares, axis=0, keep_dims=True), n, eps, kind)
    x_ptrs = x_first
    out_ptrs = out_first
    for start in range(0, n, BLOCK_N):
        offs = start + offs_n
        x = tl.load(x_ptrs, mask=in_rows & (offs < n), other=0.0).to(tl.float32)
        store_row(out_ptrs, x, mean, scale, vectors, offs, in_rows & (offs < n), offs < n)
        x_ptrs += stride_xn * BLOCK_N
        out_ptrs += stride_on * BLOCK_N


@triton.jit
def normalize_group_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    rows,
    n,
    stride_xi,
    stride_oi,
    eps,
    kind,
    has_weight,
    has_bias,
    group_size,
    blocks,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_HELD: tl.constexpr,
    MAX_GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Long rows, each by a group of programs. Grid: (groups × group_size,).

    A member has `blocks` blocks of a row. It holds its only one in registers, so that the row is read once, or without
    IS_HELD reads them two or three times, from L2 after the first while it lasts. Members exchange (mean, sum of squares
    about it) once a row, and merge them in one order. See `groups.exchange` for `partial_ptr` and `count_ptr`.
    Source for merging: Chan, Golub and LeVeque, 1979.
    """
    await_previous(OVERLAP)
    n = n * UNIT
    group = tl.program_id(0) // group_size
    member = tl.program_id(0) % group_size
    partial_ptr += group * (4 * group_size)
    count_ptr += group
    span = blocks * BLOCK_N
    first = member * span
    last = tl.minimum(n, first + span)
    num = tl.maximum(last - first, 0)
    offs = tl.arange(0, BLOCK_N)
    turn = 0
    row = group.to(tl.int64)
    while row < rows:
        row_ptr = x_ptr + row * (stride_xi * UNIT)
        mean = 0.0
        if IS_HELD:
            mask = offs < num
            x = tl.load(row_ptr + first + offs, mask=mask, other=0.0).to(tl.float32)
            if kind == LAYER:
                mean = mean_of(tl.sum(x, axis=0), tl.maximum(num, 1))
            gap = tl.where(mask, x - mean, 0.0)
            square = tl.sum(gap * gap, axis=0)
        else:
            if kind == LAYER:
                total = tl.zeros((BLOCK_N,), tl.float32)
                for start in range(first, last, BLOCK_N):
                    total += tl.load(row_ptr + start + offs, mask=start + offs < last, other=0.0).to(tl.float32)
                mean = mean_of(tl.sum(total, axis=0), tl.maximum(num, 1))
            squares = tl.zeros((BLOCK_N,), tl.float32)
            for start in range(first, last, BLOCK_N):
                mask = start + offs < last
                x = tl.load(row_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
                gap = tl.where(mask, x - mean, 0.0)
                squares += gap * gap
            square = tl.sum(squares, axis=0)
        if group_size > 1:
            means, squares_of = exchange(partial_ptr, count_ptr, member, group_size, turn, mean, square, 0.0, MAX_GROUP)
            if kind == LAYER:
                counts = tl.maximum(tl.minimum(n - tl.arange(0, MAX_GROUP) * span, span), 0).to(tl.float32)
                mean = mean_of(tl.sum(means * counts, axis=0), n)
                squares_of += counts * (means - mean) * (means - mean)
            square = tl.sum(squares_of, axis=0)
        scale = scale_of(square, n, eps, kind)
        to_ptr = out_ptr + row * (stride_oi * UNIT)
        if IS_HELD:
            x = (x - mean) * scale
            # One after the other: both would not fit into registers.
            if has_weight > 0:
                x *= tl.load(weight_ptr + first + offs, mask=mask, other=1.0).to(tl.float32)
            if has_bias > 0:
                x += tl.load(bias_ptr + first + offs, mask=mask, other=0.0).to(tl.float32)
            tl.store(to_ptr + first + offs, x.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            vectors = (weight_ptr, bias_ptr, has_weight, has_bias)
            for start in range(first, last, BLOCK_N):
                mask = start + offs < last
                x = tl.load(row_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
                store_row(to_ptr + start + offs, x, mean, scale, vectors, start + offs, mask, mask)
        turn += 1
        row += tl.num_programs(0) // group_size
    if group_size > 1:
        leave(count_ptr, group_size, turn)
