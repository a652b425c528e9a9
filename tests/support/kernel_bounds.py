"""Error bounds by dtype, and grids of shapes, for the tests of kernels.

Imports no test framework and starts no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewire.kernels.runtime.targets import is_interpreting

# Relative error of one product before it is summed, beyond exact. Operands are rounded: tf32 keeps 10 bits of each,
# tf32x3 all but about 21. Or they are summed at less than fp32: the fp8 unit keeps about 13 bits within a block.
PRODUCT_ERROR = {
    "float16": 0.0,
    "bfloat16": 0.0,
    "int8": 0.0,
    "float32": 0.0,
    "tf32": 2.0**-9,
    "tf32x3": 2.0**-20,
    "float8_e4m3fn": 2.0**-12,
    "float8_e5m2": 2.0**-12,
}
# The steepest activation: gelu's slope reaches 1.129.
_MAX_SLOPE = 1.13


@dataclass(frozen=True)
class Shape:
    """One matmul of a grid, with what it is there for."""

    m: int
    n: int
    k: int
    reason: str


MATMUL_SHAPES = (
    Shape(1, 1, 1, "nothing but tails"),
    Shape(1, 64, 96, "one row"),
    Shape(33, 1, 40, "one column"),
    Shape(16, 16, 32, "exactly one block in every dimension"),
    Shape(17, 16, 32, "one row past a block"),
    Shape(16, 17, 32, "one column past a block"),
    Shape(16, 16, 33, "one step of K past a block"),
    Shape(15, 15, 31, "one short of a block everywhere"),
    Shape(48, 40, 72, "16-byte rows, ragged blocks"),
    Shape(37, 29, 65, "odd everywhere: nothing can be read in 16-byte pieces"),
    Shape(64, 48, 128, "several blocks of K and splits"),
    Shape(5, 80, 160, "few rows against a long K"),
)
GPU_MATMUL_SHAPES = (
    *MATMUL_SHAPES,
    Shape(127, 255, 511, "one short of the large blocks"),
    Shape(128, 256, 64, "one large block"),
    Shape(129, 257, 513, "one past the large blocks"),
    Shape(1823, 781, 1000, "the softmax tutorial's odd sizes as a product"),
    Shape(1000, 1000, 1000, "16-byte rows, no power of two"),
    Shape(4096, 4096, 65, "K shorter than any pipeline, odd"),
    Shape(64, 4096, 4096, "skinny"),
    Shape(1, 4096, 14336, "one row, long K"),
    Shape(128, 128, 16384, "few tiles, very long K"),
    Shape(1024, 1024, 4096, "tiles for half the device"),
    Shape(2048, 2048, 2048, "several waves"),
    Shape(4864, 4096, 512, "partial last wave"),
)
SOFTMAX_LENGTHS = (1, 2, 16, 31, 64, 65, 100, 257)
GPU_SOFTMAX_LENGTHS = (*SOFTMAX_LENGTHS, 781, 1024, 4096, 12672, 16384, 16385, 32768, 65536, 131072, 1_000_003)
# (outer, elements, inner) of rows along the second dimension, in pieces and pairs of rows, and too long for either.
ROWS_IN_PIECES = ((1, 33, 8), (3, 40, 24), (2, 70, 6), (1, 100, 2), (5, 33, 4), (3, 1024, 2), (2, 1100, 8))
ROWS_TOO_LONG = ((1, 1025, 2), (1, 2049, 8))


def matmul_bound(
    a: torch.Tensor, b: torch.Tensor, expected: torch.Tensor, out_dtype: torch.dtype, arithmetic: str
) -> torch.Tensor:
    """The largest error that each element of a correct product may have.

    Summation errs by at most K·2^-24·Σ|a||b|, single products by `PRODUCT_ERROR`, the store by half a unit.

    Args:
        a: (…, M, K), with the row scales multiplied in.
        b: (…, K, N), with the column scales multiplied in.
        expected: the float64 result.
        out_dtype: dtype that the result was rounded to.
        arithmetic: key of `PRODUCT_ERROR`.

    Returns:
        The bound, of the shape of `expected`.
    """
    magnitude = torch.matmul(a.double().abs(), b.double().abs())
    summed = (a.shape[-1] * 2.0**-24 + PRODUCT_ERROR[arithmetic]) * magnitude * _MAX_SLOPE
    return summed + rounding_bound(expected, out_dtype) + 2.0**-22 * expected.abs()


def rounding_bound(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of `dtype` at each value of `expected`, and a little at zero."""
    if not dtype.is_floating_point:
        return torch.zeros_like(expected)
    info = torch.finfo(dtype)
    # Triton's interpreter truncates to bfloat16 where the hardware rounds.
    units = 1.0 if is_interpreting() and dtype == torch.bfloat16 else 0.5
    return expected.abs() * (info.eps * units) * 1.01 + info.smallest_normal * info.eps


def softmax_bound(expected: torch.Tensor, dtype: torch.dtype, *, log: bool, num_summed: int) -> torch.Tensor:
    """The largest error that each element of a correct softmax may have: a few units of fp32, then the store's.

    The exponential of x - max errs by the rounding of the difference, up to |x - max|·2^-24. |ln out| + ln N bounds it.
    Its sum errs by less than the logarithm of its length.
    """
    logarithm = expected if log else expected.clamp_min(2.0**-149).log()
    relative = (logarithm.abs() + num_summed.bit_length() + 8) * 2.0**-22
    own = relative if log else relative * expected + 2.0**-126
    return own + rounding_bound(expected, dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """A tensor that no kernel can have meant: NaN, or the smallest integer."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=torch.float32 if dtype.itemsize == 1 else dtype, device=device).to(dtype)
