"""Exact products of int8 matrices on the CPU.

PyTorch has a product of 2-D int8 operands with int32 sums. It is fast and exact where the processor has an instruction for it;
without one its library may saturate, or loop. All else is multiplied in float32, in parts along K that are short enough for
sums without rounding.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

# Largest K whose int8 products, each of them 2^14 at the most, have float32 sums without rounding.
MAX_EXACT_K = 2**10
# Instructions of a processor that add products of int8 to int32, as Linux names them.
DOT_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns (…, M, N) int32 products of (…, M, K) and (…, K, N) int8 matrices, exactly.

    K may be 2^17 - 1 at the most: beyond it int32 overflows.
    """
    if has_dot(b):
        products: torch.Tensor = torch._int_mm(a.flatten(0, -2), b)
        return products.view(*a.shape[:-1], b.shape[-1])
    return multiply_by_parts(a, b)


def multiply_by_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As `multiply`, in float32."""
    parts = zip(torch.split(a, MAX_EXACT_K, -1), torch.split(b, MAX_EXACT_K, -2), strict=True)
    products = (torch.matmul(rows.float(), columns.float()) for rows, columns in parts)
    acc = next(products).to(torch.int32)
    for product in products:
        acc += product.to(torch.int32)
    return acc


def has_dot(b: torch.Tensor) -> bool:
    """Whether `multiply` takes b as it is, and converts nothing."""
    return b.dtype == torch.int8 and b.dim() == 2 and _is_fast_and_exact()


@functools.cache
def _is_fast_and_exact() -> bool:
    """Whether PyTorch's product is: the flags say what the processor can, a product whether the library makes use of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    if not torch._C._has_mkldnn or DOT_FLAGS.isdisjoint(flags):
        return False
    # Where two products are added in 16 bits these saturate.
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest) == 64 * 127**2).all())
