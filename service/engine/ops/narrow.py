"""Products of int8 and 16-bit matrices on the CPU, by the processor's own instructions where they lose nothing.

PyTorch has a product of 2-D int8 operands with int32 sums. It is fast and exact where the processor has an instruction for it;
without one its library may saturate, or loop. All else is multiplied in float32, in parts along K that are short enough for
sums without rounding.

Products of 16 bits add up in float32 and round once, several times as fast as after a conversion to float32. Those of bfloat16
take numbers below 2^-126 for 0, so operands with such numbers, or with products near them, are converted.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch

# Largest K whose int8 products, each of them 2^14 at the most, have float32 sums without rounding.
MAX_EXACT_K = 2**10
# Instructions of a processor that add products of int8 to int32, as Linux names them.
DOT_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
# Instructions that add products of 16 bits to float32.
HALF_FLAGS = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16"}),
}
# Sums of products of bfloat16 are multiples of 2^-16 of the smallest product, so none of them is below 2^-126 from here on.
_LEAST_PRODUCT = 2.0**-110
_BITS = 0x7FFF
# Elements whose bits are looked at together: a core's cache has room for them.
_LOOKED_AT = 2**19


def multiply_int8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns (…, M, N) int32 products of (…, M, K) and (…, K, N) int8 matrices, exactly.

    K may be 2^17 - 1 at the most: beyond it int32 overflows.
    """
    if has_int8_dot(b):
        products: torch.Tensor = torch._int_mm(a.flatten(0, -2), b)
        return products.view(*a.shape[:-1], b.shape[-1])
    return multiply_int8_by_parts(a, b)


def multiply_int8_by_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As `multiply_int8`, in float32."""
    parts = zip(torch.split(a, MAX_EXACT_K, -1), torch.split(b, MAX_EXACT_K, -2), strict=True)
    products = (torch.matmul(rows.float(), columns.float()) for rows, columns in parts)
    acc = next(products).to(torch.int32)
    for product in products:
        acc += product.to(torch.int32)
    return acc


def has_int8_dot(b: torch.Tensor) -> bool:
    """Whether `multiply_int8` takes b as it is, and converts nothing."""
    return b.dtype == torch.int8 and b.dim() == 2 and _is_int8_exact()


def least_magnitude(x: torch.Tensor) -> float:
    """The smallest magnitude of a bfloat16 matrix's elements but 0; infinity where there are none."""
    if not x.numel():
        return math.inf
    x = x.mT if x.stride(-2) == 1 else x
    rows, least = x.reshape(-1, x.shape[-1]).view(torch.int16), _BITS
    for block in torch.split(rows, max(1, _LOOKED_AT // x.shape[-1])):
        # Magnitudes are ordered as their bits are. Less 1, those of 0 are the largest.
        least = min(least, int(torch.bitwise_and(block, _BITS).sub_(1).bitwise_and_(_BITS).min()))
    return math.inf if least == _BITS else torch.tensor(least + 1, dtype=torch.int16).view(torch.bfloat16).item()


def are_far_from_0(first: float, second: float) -> bool:
    """Whether PyTorch's product loses nothing of bfloat16 matrices with these least magnitudes."""
    return min(first, second) >= torch.finfo(torch.bfloat16).tiny and first * second >= _LEAST_PRODUCT


@functools.cache
def _flags() -> frozenset[str]:
    """The processor's flags, as Linux names them; none where PyTorch lacks the library that makes use of them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = next((line for line in lines if line.startswith("flags")), "").split()
    return frozenset(found if torch._C._has_mkldnn else ())


@functools.cache
def adds_in_float32(dtype: torch.dtype) -> bool:
    """Whether PyTorch's product of 16-bit matrices is fast, and rounded in the end alone; False for other dtypes.

    The flags say what the processor can, products what comes of it.
    """
    if HALF_FLAGS.get(dtype, frozenset()).isdisjoint(_flags()):
        return False
    # Added up in 16 bits, ones never get so far. The smallest float16 counts, too.
    ones = torch.ones((4096, 16), dtype=dtype)
    smallest = torch.full((16, 64), torch.finfo(torch.float16).smallest_normal / 2, dtype=dtype)
    return all(
        bool((rows.mT @ columns == 4096).all()) and bool((few @ ones[:64] == 64 * few[0, 0]).all())
        for rows, columns, few in ((ones, ones, smallest), (ones[:, :1], ones.mT.contiguous().mT, smallest[:1]))
    )


@functools.cache
def _is_int8_exact() -> bool:
    """Whether PyTorch's product is: the flags say what the processor can, a product whether the library makes use of it."""
    if DOT_FLAGS.isdisjoint(_flags()):
        return False
    # Where two products are added in 16 bits these saturate.
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest) == 64 * 127**2).all())
