"""Random workloads: log-uniform in size, of every dtype and layout, none of them among those tuned for. Pure.

A choice is learned from some of them and judged by others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from tilewire.kernels.autotune.defaults import defaults
from tilewire.kernels.autotune.workloads import Product, Rows, Sum, Workload
from tilewire.kernels.matmul.members import arithmetic_of, is_supported
from tilewire.kernels.runtime.targets import Target

# Milliseconds on a large GPU, so that a hundred candidates, slow ones among them, take about a second.
_MOST_FLOPS = {"ieee": 3e10, "tf32x3": 6e10, "tf32": 1.2e11, "half": 2.5e11, "int8": 4e11, "float8": 4e11}
_MOST_ELEMENTS = 1 << 27


def draw(generator: random.Random, target: Target) -> Iterator[Workload]:
    """Workloads without end, each of a size that a hundred candidates compute in about a second."""
    draws: list[Callable[[random.Random], Workload]] = [_product, _product, _product, _rows, _sum]
    while True:
        workload = generator.choice(draws)(generator)
        is_too_large = workload.num_bytes > 2 * _MOST_ELEMENTS * 4
        if isinstance(workload, Product):
            problem = workload.problem
            is_too_large |= problem.flops > _MOST_FLOPS[arithmetic_of(problem)]
            is_too_large |= not is_supported(workload.dtype, target)
        if not is_too_large and workload not in defaults():
            yield workload


def _log_uniform(generator: random.Random, least: int, most: int) -> int:
    return round(math.exp(generator.uniform(math.log(least), math.log(most))))


def _product(generator: random.Random) -> Product:
    dtype, precision = generator.choice(
        [
            *[(name, "ieee") for name in ("bfloat16", "bfloat16", "float16", "int8", "float8_e4m3fn", "float32")],
            *[("float32", precision) for precision in ("tf32", "tf32x3")],
        ]
    )
    # K-major is what the service lays out for these; the others come both ways.
    wants_k = dtype in ("int8", "float8_e4m3fn") or precision != "ieee"
    batch = 1 if generator.random() < 0.8 else _log_uniform(generator, 2, 64)
    most = 16384 if batch == 1 else 2048
    return Product(
        m=_log_uniform(generator, 1, most // 2),
        n=_log_uniform(generator, 16, most),
        k=_log_uniform(generator, 16, most),
        batch=batch,
        dtype=dtype,
        precision=precision,
        a_major="k" if generator.random() < 0.85 else "m",
        b_major="k" if generator.random() < (0.9 if wants_k else 0.4) else "n",
        is_padded=generator.random() < 0.8,
        activation=generator.choice(["none", "none", "relu", "gelu"]) if dtype != "int8" else "none",
    )


def _rows(generator: random.Random) -> Rows:
    return Rows(
        rows=_log_uniform(generator, 1, 8192),
        n=_log_uniform(generator, 16, 1 << 17),
        dtype=generator.choice(["float32", "bfloat16", "float16"]),
        is_contiguous=generator.random() < 0.9,
    )


def _sum(generator: random.Random) -> Sum:
    return Sum(
        rows=_log_uniform(generator, 1, 8192),
        n=_log_uniform(generator, 16, 1 << 16),
        dtype=generator.choice(["float32", "bfloat16", "float16"]),
        b_shape=generator.choice(["full", "row"]),
    )
