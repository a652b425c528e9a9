"""The grouped matmul kernel: jit body only.

Computes out_g = act(a_g @ b_g + bias_g) for many small products at once, accumulating in fp32 (int32 for int8).
"""

import triton
import triton.language as tl

from tilewire.kernels.matmul.epilogue import store_any
from tilewire.kernels.matmul.kernel import multiply
from tilewire.kernels.runtime.pdl import await_previous


@triton.jit
def matmul_grouped_kernel(
    table_ptr,
    groups,
    num_tiles,
    out_kind,
    bias_kind,
    activation,
    DTYPE: tl.constexpr,
    B_MAJOR: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE_K: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """Products of unequal shape in one launch, described by a table on the device.

    Grid: (programs,). Each program takes every `programs`-th tile of all products together and finds whose it is.

    `table_ptr` is (groups, 11) int64. A row has the addresses of a, b, out and bias, then m, n and k. Then come the row
    strides of a, b and out, and the number of the product's first tile. `a` is row-major; B_MAJOR is "n" or "k". With
    UNIT above 1, addresses divide by 16 and row strides, k and (for B_MAJOR "n") n divide by UNIT elements.
    """
    await_previous(OVERLAP)
    FIELDS: tl.constexpr = 11
    number = tl.arange(0, MAX_GROUPS)
    firsts = tl.load(table_ptr + number * FIELDS + 10, mask=number < groups, other=1 << 40)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group = tl.sum((firsts <= tile).to(tl.int32), axis=0) - 1
        entry = table_ptr + group * FIELDS
        a_ptr = tl.multiple_of(tl.load(entry).to(tl.pointer_type(DTYPE)), 16 if UNIT > 1 else 1)
        b_ptr = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(DTYPE)), 16 if UNIT > 1 else 1)
        out_ptr = tl.load(entry + 2).to(tl.pointer_type(tl.int8))
        bias_ptr = tl.load(entry + 3).to(tl.pointer_type(tl.int8))
        m = tl.load(entry + 4).to(tl.int32)
        n = tl.load(entry + 5).to(tl.int32)
        k = (tl.load(entry + 6) // UNIT).to(tl.int32) * UNIT
        stride_am = tl.load(entry + 7) // UNIT * UNIT
        stride_b = tl.load(entry + 8) // UNIT * UNIT
        stride_om = tl.load(entry + 9)
        within = tile - tl.load(entry + 10).to(tl.int32)
        num_pid_n = tl.cdiv(n, BLOCK_N)
        offs_m = (within // num_pid_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = (within % num_pid_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + tl.minimum(offs_m, m - 1).to(tl.int64)[:, None] * stride_am + offs_k[None, :]
        if B_MAJOR == "n":
            # Aligned rows are whole pieces of UNIT columns, so the mask is cut into the same pieces.
            n_read = (n // UNIT) * UNIT
            b_ptrs = b_ptr + offs_k.to(tl.int64)[:, None] * stride_b + offs_n[None, :]
            b_columns = (offs_n < n_read)[None, :]
            step_b = stride_b * BLOCK_K
        else:
            b_ptrs = b_ptr + offs_k[:, None] + tl.minimum(offs_n, n - 1).to(tl.int64)[None, :] * stride_b
            b_columns = tl.full((1, BLOCK_N), True, tl.int1)
            step_b = BLOCK_K
        IS_INTEGER: tl.constexpr = tl.int8 == DTYPE
        ZERO: tl.constexpr = 0 if IS_INTEGER else 0.0
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32 if IS_INTEGER else tl.float32)
        for start in range(0, k, BLOCK_K):
            in_k = offs_k < k - start
            a = tl.load(a_ptrs, mask=in_k[None, :], other=ZERO)
            b = tl.load(b_ptrs, mask=b_columns & in_k[:, None], other=ZERO)
            acc = multiply(a, b, acc, PRECISION, IMPRECISE_K, UPCAST)
            a_ptrs += BLOCK_K
            b_ptrs += step_b
        epilogue = (bias_ptr, bias_ptr, bias_ptr, bias_kind, -1, -1, activation)
        store_any(acc, offs_m, offs_n, m, n, out_ptr, out_kind, epilogue, 0, stride_om, 1, False, IN_PTX)
