"""The normalisation kernels: jit bodies only.

All compute out = (x - mean) · scale · weight + bias along rows of N elements, in float32. The kind is passed at run time.
About 8·rows·N flops; rows·N·(input size + output size) bytes at least.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.pdl import await_previous

# Kinds, numbered as in `op.KINDS`.
LAYER = tl.constexpr(0)
RMS = tl.constexpr(1)


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
    stride_x,
    stride_o,
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
    from_x = row.to(tl.int64)[:, None] * (stride_x * UNIT)
    x = tl.load(x_ptr + from_x + offs, mask=mask, other=0.0).to(tl.float32)
    mean = tl.zeros((BLOCK_ROWS,), tl.float32)
    if kind == LAYER:
        mean = tl.sum(x, axis=1) / n
    gap = tl.where(mask, x - mean[:, None], 0.0)
    scale = scale_of(tl.sum(gap * gap, axis=1), n, eps, kind)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * (stride_o * UNIT) + offs
    vectors = (weight_ptr, bias_ptr, has_weight, has_bias)
    store_row(out_ptrs, x, mean[:, None], scale[:, None], vectors, offs, mask, in_n)


@triton.jit
def normalize_loop_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    n,
    stride_x,
    stride_o,
    eps,
    kind,
    has_weight,
    has_bias,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A long row read two or three times, from L2 after the first while it lasts. Grid: (rows,)."""
    await_previous(OVERLAP)
    n = n * UNIT
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * (stride_x * UNIT)
    out_ptr += row * (stride_o * UNIT)
    offs = tl.arange(0, BLOCK_N)
    one = tl.zeros((1,), tl.float32)
    mean = one
    if kind == LAYER:
        total = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, n, BLOCK_N):
            total += tl.load(x_ptr + start + offs, mask=start + offs < n, other=0.0).to(tl.float32)
        mean = one + tl.sum(total, axis=0) / n
    square = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, n, BLOCK_N):
        in_n = start + offs < n
        x = tl.load(x_ptr + start + offs, mask=in_n, other=0.0).to(tl.float32)
        gap = tl.where(in_n, x - mean, 0.0)
        square += gap * gap
    scale = scale_of(one + tl.sum(square, axis=0), n, eps, kind)
    vectors = (weight_ptr, bias_ptr, has_weight, has_bias)
    for start in range(0, n, BLOCK_N):
        in_n = start + offs < n
        x = tl.load(x_ptr + start + offs, mask=in_n, other=0.0).to(tl.float32)
        store_row(out_ptr + start + offs, x, mean, scale, vectors, start + offs, in_n, in_n)
