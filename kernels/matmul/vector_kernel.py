# mypy: ignore-errors
"""The matmul kernel for a few rows without the matrix unit: jit body only.

With M ≤ 4 each element of `b` is used at most four times, so that reading `b` is all that counts. Threads then multiply what
they have read, keep one sum for each element of a block of `b`, and add those up once, at the end. 2·M·N·K flops; K·N·input
size bytes at least.
"""

import triton
import triton.language as tl

from tilewire.kernels.matmul.epilogue import store_any
from tilewire.kernels.matmul.kernel import combine_splits
from tilewire.kernels.runtime.pdl import await_previous


@triton.jit
def load_row(a_ptr, row, m, stride_am, offs_k, last_k, ZERO: tl.constexpr, ACC: tl.constexpr):
    """Elements `offs_k` of row `row` of `a`, zero from `last_k` on; the last row where there are fewer."""
    a_ptr += tl.minimum(row, m - 1).to(tl.int64) * stride_am
    return tl.load(a_ptr + offs_k, mask=offs_k < last_k, other=ZERO).to(ACC)


@triton.jit
def matmul_vector_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    bias_ptr,
    a_scale_ptr,
    b_scale_ptr,
    partial_ptr,
    count_ptr,
    m,
    n,
    k,
    stride_am,
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
    B_MAJOR: tl.constexpr,
    IN_PIECES: tl.constexpr,
    N_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    IN_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Up to BLOCK_M (1, 2 or 4) rows, whose elements follow one another. Grid: (column blocks × entries, splits of K).

    Arguments are those of `matmul_kernel`; sums are float32, int32 for int8. STAGES blocks of `b` are in flight.
    """
    await_previous(OVERLAP)
    n = n * N_UNIT
    k = k * K_UNIT
    num_tiles = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    entry = pid // num_tiles
    offs_n = (pid % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    outer = (entry // batch_inner).to(tl.int64)
    inner = (entry % batch_inner).to(tl.int64)
    a_ptr += outer * (stride_az * IN_UNIT) + inner * (stride_ay * IN_UNIT)
    b_ptr += outer * (stride_bz * IN_UNIT) + inner * (stride_by * IN_UNIT)
    blocks_per_split = tl.cdiv(tl.cdiv(k, BLOCK_K), tl.num_programs(1))
    first_k = tl.program_id(1) * blocks_per_split * BLOCK_K
    last_k = tl.minimum(k, first_k + blocks_per_split * BLOCK_K)
    stride_am = stride_am * IN_UNIT

    IS_INTEGER: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ACC: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    ZERO: tl.constexpr = 0 if IS_INTEGER else 0.0
    IS_ROWS: tl.constexpr = B_MAJOR == "k"
    ALONG: tl.constexpr = 1 if IS_ROWS else 0
    SHAPE: tl.constexpr = (BLOCK_N, BLOCK_K) if IS_ROWS else (BLOCK_K, BLOCK_N)
    acc0 = tl.zeros(SHAPE, dtype=ACC)
    if BLOCK_M >= 2:
        acc1 = tl.zeros(SHAPE, dtype=ACC)
    if BLOCK_M == 4:
        acc2 = tl.zeros(SHAPE, dtype=ACC)
        acc3 = tl.zeros(SHAPE, dtype=ACC)
    for start in tl.range(first_k, last_k, BLOCK_K, num_stages=STAGES):
        offs_k = start + tl.arange(0, BLOCK_K)
        if IS_ROWS:
            columns = tl.minimum(offs_n, n - 1).to(tl.int64) * (stride_bn * IN_UNIT)
            b_ptrs = b_ptr + columns[:, None] + offs_k[None, :]
            b = tl.load(b_ptrs, mask=(offs_k < last_k)[None, :], other=ZERO).to(ACC)
        else:
            b_ptrs = b_ptr + offs_k.to(tl.int64)[:, None] * (stride_bk * IN_UNIT) + offs_n[None, :]
            b = tl.load(b_ptrs, mask=(offs_k < last_k)[:, None] & (offs_n < n)[None, :], other=ZERO).to(ACC)
        acc0 += b * tl.expand_dims(load_row(a_ptr, 0, m, stride_am, offs_k, last_k, ZERO, ACC), 1 - ALONG)
        if BLOCK_M >= 2:
            acc1 += b * tl.expand_dims(load_row(a_ptr, 1, m, stride_am, offs_k, last_k, ZERO, ACC), 1 - ALONG)
        if BLOCK_M == 4:
            acc2 += b * tl.expand_dims(load_row(a_ptr, 2, m, stride_am, offs_k, last_k, ZERO, ACC), 1 - ALONG)
            acc3 += b * tl.expand_dims(load_row(a_ptr, 3, m, stride_am, offs_k, last_k, ZERO, ACC), 1 - ALONG)

    offs_m = tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC) + tl.sum(acc0, axis=ALONG)[None, :]
    if BLOCK_M >= 2:
        acc = tl.where((offs_m == 1)[:, None], tl.sum(acc1, axis=ALONG)[None, :], acc)
    if BLOCK_M == 4:
        acc = tl.where((offs_m == 2)[:, None], tl.sum(acc2, axis=ALONG)[None, :], acc)
        acc = tl.where((offs_m == 3)[:, None], tl.sum(acc3, axis=ALONG)[None, :], acc)
    is_last = tl.num_programs(1) == 1
    if not is_last:
        acc, is_last = combine_splits(acc, partial_ptr, count_ptr, pid)
    store_any(
        acc,
        offs_m,
        offs_n,
        tl.where(is_last, m, 0),
        n,
        out_ptr,
        bias_ptr,
        a_scale_ptr,
        b_scale_ptr,
        out_kind,
        bias_kind,
        a_scale_step,
        b_scale_step,
        activation,
        outer * stride_oz + inner * stride_oy,
        stride_om,
        stride_on,
        IN_PIECES,
    )
