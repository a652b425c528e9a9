# mypy: ignore-errors
"""Finishes an accumulator after the product: scales, bias, activation, the store. Jit functions only.

Their bodies are Triton's language, so mypy leaves them out, as it does the `kernel.py` files.
"""

import triton
import triton.language as tl

from tilewire.kernels.runtime.elements import BFLOAT16, FLOAT16, INT32, load_floats

# Activations are passed at run time, so that no binary is needed for each; in the order of `configs.ACTIVATIONS`.
RELU = tl.constexpr(1)
LEAKY_RELU = tl.constexpr(2)
GELU = tl.constexpr(3)
SILU = tl.constexpr(4)
TANH = tl.constexpr(6)
# -log₂ e, which makes powers of e powers of 2.
_POWER = tl.constexpr(-1.4426950408889634)
# The tanh form of gelu is x σ(1.5957… (x + 0.044715 x³)): the factors of x and x³, times -log₂ e.
_GELU_1 = tl.constexpr(-2.302208198144325)
_GELU_3 = tl.constexpr(-0.1029432395800235)


@triton.jit
def optimization_barrier(x, IN_PTX: tl.constexpr):
    """Returns float32 `x`; LLVM does not look through it, and ptxas takes it away.

    LLVM's vectorizer of straight code follows each element of a tile back through every branch. Its time grows faster than
    the number of branches: without a barrier between sums of splits and activations it takes most of LLVM's time.
    """
    if IN_PTX:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def over_one_plus(x, power, IN_PTX: tl.constexpr):
    """Returns x / (1 + 2^power), to float32 accuracy."""
    if IN_PTX:
        # One instruction inverts, where a quotient takes eight. Its error is one unit; it rounds results below 2^-126 to 0.
        # Named together, the three cost a compiler less than one by one: each tile has hundreds.
        inverse = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
            "=f,f",
            [power],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        result = x * inverse
    else:
        root = tl.rsqrt(1.0 + tl.exp2(power))
        result = x * root * root
    return result


@triton.jit
def tanh(x, IN_PTX: tl.constexpr):
    """Hyperbolic tangent to float32 accuracy.

    Away from zero 2 σ(2x) - 1; near zero, where that cancels, the odd Taylor polynomial to x^9.
    """
    square = x * x
    series = -0.05396825396825397 + square * 0.021869488536155203
    series = 0.13333333333333333 + square * series
    series = -0.3333333333333333 + square * series
    return tl.where(square < 0.0625, x + x * square * series, over_one_plus(2.0, x * (2.0 * _POWER), IN_PTX) - 1.0)


@triton.jit
def activate(x, activation, IN_PTX: tl.constexpr):
    """Apply the activation numbered `activation`, 1 or more, to float32 `x`; NaN stays NaN.

    Each has code of its own: matrix units wait meanwhile, some 0.7 % of a product of 4096³ for each instruction.
    """
    if activation == RELU:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif activation == LEAKY_RELU:
        x = tl.maximum(x, 0.01 * x, propagate_nan=tl.PropagateNan.ALL)
    elif activation == GELU:
        x = over_one_plus(x, x * (_GELU_1 + _GELU_3 * (x * x)), IN_PTX)
    elif activation == SILU:
        x = over_one_plus(x, x * _POWER, IN_PTX)
    elif activation == TANH:
        x = tanh(x, IN_PTX)
    else:
        x = over_one_plus(1.0, x * _POWER, IN_PTX)
    return x


@triton.jit
def apply_epilogue(acc, offs_m, offs_n, m, n, epilogue, IN_PTX: tl.constexpr):
    """act(acc * a_scale * b_scale + bias) in float32.

    `acc` is (BLOCK_M, BLOCK_N) for rows `offs_m` and columns `offs_n`. `epilogue` is (bias_ptr, a_scale_ptr, b_scale_ptr,
    bias_kind, a_scale_step, b_scale_step, activation). The steps say how the scales lie: -1 none, 0 one for all, 1 one for
    each row (a) or column (b). `bias_kind` is the type of the bias, 0 without one. IN_PTX: the target is NVIDIA's. It is no
    part of the tuple, where constants become values, and both branches on it would be compiled.
    """
    bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, activation = epilogue
    acc = acc.to(tl.float32)
    if a_scale_step >= 0:
        acc = acc * tl.load(a_scale_ptr + offs_m * a_scale_step, mask=offs_m < m, other=0.0)[:, None]
    if b_scale_step >= 0:
        acc = acc * tl.load(b_scale_ptr + offs_n * b_scale_step, mask=offs_n < n, other=0.0)[None, :]
    if bias_kind > 0:
        acc = acc + load_floats(bias_ptr, bias_kind, offs_n, offs_n < n)[None, :]
    acc = optimization_barrier(acc, IN_PTX)
    if activation > 0:
        acc = activate(acc, activation, IN_PTX)
    return acc


@triton.jit
def apply_epilogue_to_integers(acc, offs_n, n, epilogue):
    """act(acc + bias) in int32; `relu` is the only activation of integers, and scales have no place."""
    bias_ptr, _, _, bias_kind, _, _, activation = epilogue
    if bias_kind > 0:
        bias = tl.load(bias_ptr.to(tl.pointer_type(tl.int32)) + offs_n, mask=offs_n < n, other=0)
        acc = acc + bias[None, :]
    if activation == RELU:
        acc = tl.maximum(acc, 0)
    return acc


@triton.jit
def finish_as(acc, offs_m, offs_n, m, n, epilogue, TYPE: tl.constexpr, IN_PTX: tl.constexpr):
    """`apply_epilogue_to_integers` for an int32 output TYPE, else `apply_epilogue`."""
    if tl.int32 == TYPE:
        acc = apply_epilogue_to_integers(acc, offs_n, n, epilogue)
    else:
        acc = apply_epilogue(acc, offs_m, offs_n, m, n, epilogue, IN_PTX)
    return acc


@triton.jit
def store_typed(
    out_ptr, tile, offs_m, offs_n, m, n, first, stride_om, stride_on, TYPE: tl.constexpr, IN_PIECES: tl.constexpr
):
    """Store `tile` as TYPE at the byte pointer `out_ptr`.

    With IN_PIECES rows start at multiples of 16 bytes and columns follow one another. Then `first` (where row 0 begins)
    and `stride_om` are in pieces of 16 bytes. Without, they and `stride_on` are in elements.
    """
    out_ptr = out_ptr.to(tl.pointer_type(TYPE))
    tile = tile.to(TYPE)
    in_rows = (offs_m < m)[:, None]
    rows = first + offs_m.to(tl.int64) * stride_om
    if IN_PIECES:
        UNIT: tl.constexpr = 128 // TYPE.primitive_bitwidth
        out_ptrs = out_ptr + (rows * UNIT)[:, None] + offs_n[None, :]
        # Whole pieces of a row are stored as such, what is left of it element by element.
        n_whole = (n // UNIT) * UNIT
        tl.store(out_ptrs, tile, mask=in_rows & (offs_n < n_whole)[None, :])
        if n_whole < n:
            tl.store(out_ptrs, tile, mask=in_rows & ((offs_n >= n_whole) & (offs_n < n))[None, :])
    else:
        out_ptrs = out_ptr + rows[:, None] + (offs_n.to(tl.int64) * stride_on)[None, :]
        tl.store(out_ptrs, tile, mask=in_rows & (offs_n < n)[None, :])


@triton.jit
def store_any(
    acc,
    offs_m,
    offs_n,
    m,
    n,
    out_ptr,
    out_kind,
    epilogue,
    first,
    stride_om,
    stride_on,
    IN_PIECES: tl.constexpr,
    IN_PTX: tl.constexpr,
):
    """Applies the epilogue to `acc` and stores it as `out_kind` says; see `apply_epilogue` and `store_typed`."""
    if acc.dtype == tl.int32:  # noqa: SIM102 - the first is known when compiling, the second is not
        if out_kind == INT32:
            whole = apply_epilogue_to_integers(acc, offs_n, n, epilogue)
            store_typed(out_ptr, whole, offs_m, offs_n, m, n, first, stride_om, stride_on, tl.int32, IN_PIECES)
    if out_kind != INT32:
        tile = apply_epilogue(acc, offs_m, offs_n, m, n, epilogue, IN_PTX)
        if out_kind == FLOAT16:
            store_typed(out_ptr, tile, offs_m, offs_n, m, n, first, stride_om, stride_on, tl.float16, IN_PIECES)
        elif out_kind == BFLOAT16:
            store_typed(out_ptr, tile, offs_m, offs_n, m, n, first, stride_om, stride_on, tl.bfloat16, IN_PIECES)
        else:
            store_typed(out_ptr, tile, offs_m, offs_n, m, n, first, stride_om, stride_on, tl.float32, IN_PIECES)
