# mypy: ignore-errors
"""The matmul kernel for small products and narrow ones: jit functions only.

A thread has whole sums, or a share of them, instead of a program a tile of one product. So products of 3 × 3 elements
occupy the device, if there are many, and so do rows times a vector.
"""

import triton
import triton.language as tl

from tilewire.kernels.matmul.epilogue import apply_epilogue, apply_epilogue_to_integers
from tilewire.kernels.runtime.elements import INT32, store_floats, wrapped
from tilewire.kernels.runtime.pdl import await_previous


@triton.jit
def store_sums(sums, rows, columns, n, mask, offs, out_ptr, out_kind, epilogue, IN_PTX: tl.constexpr):
    """`epilogue.store_any` for sums of many products, (SIDE, SIDE, BLOCK_N): their rows, columns and offsets in the output."""
    bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, activation = epilogue
    if sums.dtype == tl.int32:  # noqa: SIM102 - the first is known when compiling, the second is not
        if out_kind == INT32:
            whole = apply_epilogue_to_integers(sums, columns, n, epilogue)
            tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + offs, whole, mask=mask)
    if out_kind != INT32:
        tile = sums.to(tl.float32)
        if a_scale_step >= 0:
            tile = tile * tl.load(a_scale_ptr + rows * a_scale_step)
        rest = (bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, -1, b_scale_step, activation)
        SIDE: tl.constexpr = sums.shape[0]
        tile = apply_epilogue(tile, tl.arange(0, 1), columns, 1, n, rest, IN_PTX, SIDE * SIDE)
        store_floats(out_ptr, out_kind, offs, tile, mask)


@triton.jit
def matmul_element_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    bias_ptr,
    a_scale_ptr,
    b_scale_ptr,
    m,
    n,
    k,
    batch,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    batch_inner,
    stride_az,
    stride_ay,
    stride_bz,
    stride_by,
    stride_oz,
    stride_oy,
    out_kind,
    bias_kind,
    a_scale_step,
    b_scale_step,
    activation,
    SIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """Any sizes and strides. Grid: (blocks of BLOCK_N squares of any entries,).

    A square is the sums of SIDE rows and SIDE columns, each as far from the next as there are squares beside it: so
    neighbouring squares are neighbours in memory. Squares are numbered, those beside each other first, over all `batch`
    entries. LANES neighbouring threads share one, and add up BLOCK_K elements of K at a time. Other arguments are those of
    `matmul_kernel`.

    Rows, columns and squares past the end are read in place of the last. Their sums are not stored.
    """
    await_previous(OVERLAP)
    down = tl.cdiv(m, SIDE)
    across = tl.cdiv(n, SIDE)
    of_entry = tl.cast(down, tl.int64) * across
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    left = of_entry * batch - first
    entry = first // of_entry
    within = first - entry * of_entry
    offs = tl.arange(0, BLOCK_N)
    at = tl.minimum(offs, tl.minimum(left, BLOCK_N).to(tl.int32) - 1)
    times, column = wrapped((within % across).to(tl.int32) + at, across, BLOCK_N)
    times, row = wrapped((within // across).to(tl.int32) + times, down, BLOCK_N)
    times, inner = wrapped((entry % batch_inner).to(tl.int32) + times, batch_inner, BLOCK_N)
    outer = ((entry // batch_inner).to(tl.int32) + times).to(tl.int64)
    inner = inner.to(tl.int64)
    side = tl.arange(0, SIDE)
    rows = row[None, None, :] + side[:, None, None] * down
    columns = column[None, :] + side[:, None] * across
    mask = (rows < m) & (columns < n)[None, :] & (offs < left)[None, None, :]
    rows = tl.minimum(rows, m - 1)
    columns = tl.minimum(columns, n - 1)

    IS_INTEGER: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ACC: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    ZERO: tl.constexpr = 0 if IS_INTEGER else 0.0
    lane = tl.arange(0, LANES)[None, None, None, :]
    from_a = (outer * stride_az + inner * stride_ay)[None, None, :] + rows.to(tl.int64) * stride_am
    from_b = (outer * stride_bz + inner * stride_by)[None, None, :] + columns.to(tl.int64)[None, :] * stride_bn
    a_ptrs = a_ptr + (from_a[:, :, :, None] + lane.to(tl.int64) * stride_ak)
    b_ptrs = b_ptr + (from_b[:, :, :, None] + lane.to(tl.int64) * stride_bk)
    acc = tl.zeros((SIDE, SIDE, BLOCK_N, LANES), dtype=ACC)
    for start in range(0, k, BLOCK_K):
        for step in tl.static_range(BLOCK_K // LANES):
            in_k = start + step * LANES + lane < k
            a = tl.load(a_ptrs + step * LANES * stride_ak, mask=in_k, other=ZERO).to(ACC)
            b = tl.load(b_ptrs + step * LANES * stride_bk, mask=in_k, other=ZERO).to(ACC)
            acc += a * b
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    sums = tl.sum(acc, axis=3)

    to_out = (outer * stride_oz + inner * stride_oy)[None, None, :] + rows.to(tl.int64) * stride_om
    to_out += columns.to(tl.int64)[None, :] * stride_on
    epilogue = (bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, activation)
    store_sums(sums, rows, columns, n, mask, to_out, out_ptr, out_kind, epilogue, IN_PTX)
