# mypy: ignore-errors
"""Finishes an accumulator after the product: scales, bias, activation, the store. Jit functions only.

Their bodies are Triton's language, so mypy leaves them out, as it does the `kernel.py` files.
"""

import struct

import triton
import triton.language as tl

from tilewire.kernels.runtime.elements import BFLOAT16, FLOAT16, INT32, load_floats

# Activations are passed at run time, so that no binary is needed for each; in the order of `configs.ACTIVATIONS`.
RELU = tl.constexpr(1)
LEAKY_RELU = tl.constexpr(2)
GELU = tl.constexpr(3)
SILU = tl.constexpr(4)
SIGMOID = tl.constexpr(5)
TANH = tl.constexpr(6)
# -log₂ e, which makes powers of e powers of 2.
_POWER = tl.constexpr(-1.4426950408889634)
# The tanh form of gelu is x σ(1.5957… (x + 0.044715 x³)): the factors of x and x³, times -log₂ e.
_GELU_1 = tl.constexpr(-2.302208198144325)
_GELU_3 = tl.constexpr(-0.1029432395800235)
# The odd Taylor polynomial of tanh, to x^9, and the square of x below which it is used.
_TANH_3 = tl.constexpr(-1 / 3)
_TANH_5 = tl.constexpr(2 / 15)
_TANH_7 = tl.constexpr(-17 / 315)
_TANH_9 = tl.constexpr(62 / 2835)
_NEAR = tl.constexpr(0.0625)
# Of leaky relu, below zero.
_SLOPE = tl.constexpr(0.01)
# Most elements of a thread that one text in PTX activates.
_MOST_TOGETHER = tl.constexpr(64)


@triton.jit
def over_one_plus(x, power):
    """Returns x / (1 + 2^power), to float32 accuracy."""
    root = tl.rsqrt(1.0 + tl.exp2(power))
    return x * root * root


@triton.jit
def tanh(x):
    """Hyperbolic tangent to float32 accuracy.

    Away from zero 2 σ(2x) - 1; near zero, where that cancels, a polynomial.
    """
    square = x * x
    series = square * _TANH_9 + _TANH_7
    series = square * series + _TANH_5
    series = square * series + _TANH_3
    return tl.where(square < _NEAR, x + x * square * series, over_one_plus(2.0, x * (2.0 * _POWER)) - 1.0)


def _hex(value):
    """A float32 constant in PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()


# 1 / (1 + 2^s) in place of s. One instruction inverts, where a quotient takes eight. The two special ones err by one unit
# each, and round results below 2^-126 to 0.
_SIGMA = f"ex2.approx.ftz.f32 s, s; add.f32 s, s, {_hex(1.0)}; rcp.approx.ftz.f32 s, s;"
_SIGMOID = f"mul.f32 s, @, {_hex(_POWER.value)}; {_SIGMA}"
_GELU_POWER = f"mul.f32 s, @, @; fma.rn.f32 s, s, {_hex(_GELU_3.value)}, {_hex(_GELU_1.value)}; mul.f32 s, s, @;"
_FAR_TANH = f"mul.f32 s, @, {_hex(2 * _POWER.value)}; {_SIGMA} fma.rn.f32 s, s, {_hex(2.0)}, {_hex(-1.0)};"
_SERIES = " ".join(f"fma.rn.f32 t, q, t, {_hex(factor.value)};" for factor in (_TANH_7, _TANH_5, _TANH_3))
_NEAR_TANH = f"mul.f32 q, @, @; mov.f32 t, {_hex(_TANH_9.value)}; {_SERIES} mul.f32 t, t, q; fma.rn.f32 t, t, @, @;"
# What `activate` does to an element @, by number of the activation; registers s, q and t and the predicate p are free.
_IN_PTX = tl.constexpr(
    (
        (RELU.value, f"max.NaN.f32 @, @, {_hex(0.0)};"),
        (LEAKY_RELU.value, f"mul.f32 s, @, {_hex(_SLOPE.value)}; max.NaN.f32 @, @, s;"),
        (GELU.value, f"{_GELU_POWER} {_SIGMA} mul.f32 @, @, s;"),
        (SILU.value, f"{_SIGMOID} mul.f32 @, @, s;"),
        (SIGMOID.value, f"{_SIGMOID} mov.f32 @, s;"),
        (TANH.value, f"{_FAR_TANH} {_NEAR_TANH} setp.lt.f32 p, q, {_hex(_NEAR.value)}; selp.f32 @, t, s, p;"),
    )
)


@triton.constexpr_function
def ptx_of_activations(count):
    """PTX that activates `count` elements of a thread in place, and its constraints.

    Its operands are the elements and as many copies of the activation's number. The branches are in it: LLVM would
    follow each element through each of them, and its time grows faster than their number.
    """
    parts = [f"setp.eq.s32 p, ${2 * count}, {number}; @p bra.uni A{number};" for number, _ in _IN_PTX]
    parts += ["bra.uni END;"]
    for number, text in _IN_PTX:
        parts += [f"A{number}:", *(text.replace("@", f"${element}") for element in range(count)), "bra.uni END;"]
    text = "{ .reg .f32 s, q, t; .reg .pred p; " + " ".join(parts) + " END: }"
    return text, ",".join(["=f"] * count + [str(element) for element in range(count)] + ["r"] * count)


@triton.jit
def activate(x, activation, IN_PTX: tl.constexpr, MOST: tl.constexpr = _MOST_TOGETHER):
    """Apply the activation numbered `activation`, 1 or more, to float32 `x`; NaN stays NaN.

    MOST elements of a thread are activated together. Each activation has code of its own: matrix units wait meanwhile, some
    0.7 % of a product of 4096³ for each instruction.
    """
    if IN_PTX:
        COUNT: tl.constexpr = min(MOST, x.numel)
        PTX: tl.constexpr = ptx_of_activations(COUNT)
        x = tl.inline_asm_elementwise(PTX[0], PTX[1], [x, activation], dtype=tl.float32, is_pure=True, pack=COUNT)
    elif activation == RELU:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif activation == LEAKY_RELU:
        x = tl.maximum(x, x * _SLOPE, propagate_nan=tl.PropagateNan.ALL)
    elif activation == GELU:
        x = over_one_plus(x, x * (_GELU_1 + _GELU_3 * (x * x)))
    elif activation == SILU:
        x = over_one_plus(x, x * _POWER)
    elif activation == TANH:
        x = tanh(x)
    elif activation == SIGMOID:
        x = over_one_plus(1.0, x * _POWER)
    return x


@triton.jit
def apply_epilogue(acc, offs_m, offs_n, m, n, epilogue, IN_PTX: tl.constexpr, MOST: tl.constexpr = _MOST_TOGETHER):
    """act(acc * a_scale * b_scale + bias) in float32.

    `acc` is (BLOCK_M, BLOCK_N) for rows `offs_m` and columns `offs_n`. `epilogue` is (bias_ptr, a_scale_ptr, b_scale_ptr,
    bias_kind, a_scale_step, b_scale_step, activation). The steps say how the scales lie: -1 none, 0 one for all, 1 one for
    each row (a) or column (b). `bias_kind` is the type of the bias, 0 without one. IN_PTX: the target is NVIDIA's. It is no
    part of the tuple, where constants become values, and both branches on it would be compiled. MOST: see `activate`.
    """
    bias_ptr, a_scale_ptr, b_scale_ptr, bias_kind, a_scale_step, b_scale_step, activation = epilogue
    acc = acc.to(tl.float32)
    if a_scale_step >= 0:
        acc = acc * tl.load(a_scale_ptr + offs_m * a_scale_step, mask=offs_m < m, other=0.0)[:, None]
    if b_scale_step >= 0:
        acc = acc * tl.load(b_scale_ptr + offs_n * b_scale_step, mask=offs_n < n, other=0.0)[None, :]
    if bias_kind > 0:
        acc = acc + load_floats(bias_ptr, bias_kind, offs_n, offs_n < n)[None, :]
    if activation > 0:
        acc = activate(acc, activation, IN_PTX, MOST)
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
