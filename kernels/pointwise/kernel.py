"""The pointwise kernel: jit bodies only.

Computes out = fn(x) · scale + shift or fn(x, y) · scale + shift in float32, over operands that broadcast. The function
is chosen at run time: its cost is hidden behind memory. Three elements moved at most.
"""

import triton
import triton.language as tl

from tilewire.kernels.add.kernel import load_tile, place_tile, store_as
from tilewire.kernels.matmul.epilogue import activate
from tilewire.kernels.runtime.elements import BFLOAT16, FLOAT16
from tilewire.kernels.runtime.pdl import await_previous

# Functions of one tensor above the activations, and of two; numbered as in `op.UNARY` and `op.BINARY`.
EXP = tl.constexpr(7)
LOG = tl.constexpr(8)
SQRT = tl.constexpr(9)
RSQRT = tl.constexpr(10)
ABS = tl.constexpr(11)
MUL = tl.constexpr(0)
SUB = tl.constexpr(1)
DIV = tl.constexpr(2)
MAXIMUM = tl.constexpr(3)


@triton.jit
def exponential(x):
    """E^x to float32 accuracy at any magnitude: e^r · 2^n, |r| ≤ ln 2 / 2 but where n is bounded.

    The device's own exponential loses bits as |x| grows. Source: the reduction of Cody and Waite, 1980.
    """
    # Added to 1.5 · 2^23 + 127 a float is rounded to a whole number, and leaves its exponent in the lowest bits.
    number = tl.minimum(tl.maximum(x * 1.4426950408889634, -126.0), 126.0) + 12583039.0
    whole = number - 12583039.0
    power = (number.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return tl.exp((x - whole * 0.693359375) + whole * 2.12194440e-4) * power


@triton.jit
def apply_unary(x, fn, IS_NARROW: tl.constexpr):
    """The function numbered `fn` of float32 `x`. Where IS_NARROW, the output has 16 bits."""
    if fn < EXP:
        x = activate(x, fn, False)
    elif fn == EXP:
        # What the device's own exponential loses, a narrow output does not hold.
        x = tl.exp(x) if IS_NARROW else exponential(x)
    elif fn == LOG:
        x = tl.log(x)
    elif fn == SQRT:
        x = tl.sqrt_rn(x)
    elif fn == RSQRT:
        x = tl.rsqrt(x)
    elif fn == ABS:
        x = tl.abs(x)
    else:
        # Triton negates by a difference from 0.0, which would make 0.0 of 0.0.
        x = x * -1.0
    return x


@triton.jit
def apply_binary(x, y, fn, IS_NARROW: tl.constexpr):
    """The function numbered `fn` of float32 `x` and `y`; a NaN is the maximum and the minimum, as in PyTorch."""
    if fn == MUL:
        x = x * y
    elif fn == SUB:
        x = x - y
    elif fn == DIV:
        # An error of two units in float32 is lost in a narrow output.
        x = x / y if IS_NARROW else tl.div_rn(x, y)
    elif fn == MAXIMUM:
        x = tl.where((x != x) | (x > y), x, y)
    else:
        x = tl.where((x != x) | (x < y), x, y)
    return x


@triton.jit
def pointwise_tile(
    x,
    y,
    out_ptr,
    scale,
    shift,
    to_out,
    offs_n,
    mask,
    fn,
    out_kind,
    X_INNER: tl.constexpr,
    Y_INNER: tl.constexpr,
    IS_BINARY: tl.constexpr,
    IS_TYPED: tl.constexpr,
):
    """One tile. Unless IS_TYPED, `out_kind` is the output's type."""
    IS_NARROW: tl.constexpr = IS_TYPED and out_ptr.dtype.element_ty.primitive_bitwidth < 32
    x = load_tile(x, offs_n, mask, X_INNER).to(tl.float32)
    if IS_BINARY:
        y = load_tile(y, offs_n, mask, Y_INNER).to(tl.float32)
        # Either operand may repeat along the tile.
        x, y = tl.broadcast(x, y)
        result = apply_binary(x, y, fn, IS_NARROW)
    else:
        result = apply_unary(x, fn, IS_NARROW)
    result = result * tl.cast(scale, tl.float32) + tl.cast(shift, tl.float32)
    if IS_TYPED:
        store_as(result, out_ptr, to_out, mask, out_ptr.dtype.element_ty)
    elif out_kind == FLOAT16:
        store_as(result, out_ptr, to_out, mask, tl.float16)
    elif out_kind == BFLOAT16:
        store_as(result, out_ptr, to_out, mask, tl.bfloat16)
    else:
        store_as(result, out_ptr, to_out, mask, tl.float32)


@triton.jit
def pointwise_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    scale,
    shift,
    rows,
    n,
    extent_1,
    extent_2,
    divisor_1,
    divisor_2,
    divisor_n,
    is_narrow,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_xn,
    stride_y0,
    stride_y1,
    stride_y2,
    stride_yn,
    stride_o0,
    stride_o1,
    stride_o2,
    stride_on,
    fn,
    out_kind,
    UNIT: tl.constexpr,
    X_INNER: tl.constexpr,
    Y_INNER: tl.constexpr,
    OUT_INNER: tl.constexpr,
    OUTER_RANK: tl.constexpr,
    IS_BINARY: tl.constexpr,
    IS_TYPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows of `n` elements, numbered over three dimensions. Grid: (row blocks × column blocks,).

    A whole block is moved without a mask, which is what lets the compiler move 16 bytes at a time for any `n`.
    """
    await_previous(OVERLAP)
    x = (x_ptr, (stride_x0, stride_x1, stride_x2), stride_xn)
    y = (y_ptr, (stride_y0, stride_y1, stride_y2), stride_yn)
    out = ((stride_o0, stride_o1, stride_o2), stride_on)
    sizes = (extent_1, extent_2), (divisor_1, divisor_2, divisor_n)
    x, y, to_out, offs_n, mask, is_cut = place_tile(
        rows, n, sizes, is_narrow, x, y, out, UNIT, X_INNER, Y_INNER, OUT_INNER, OUTER_RANK, BLOCK_ROWS, BLOCK_N
    )
    if not IS_TYPED or is_cut:
        pointwise_tile(
            x, y, out_ptr, scale, shift, to_out, offs_n, mask, fn, out_kind, X_INNER, Y_INNER, IS_BINARY, IS_TYPED
        )
    else:
        pointwise_tile(
            x, y, out_ptr, scale, shift, to_out, offs_n, None, fn, out_kind, X_INNER, Y_INNER, IS_BINARY, IS_TYPED
        )
