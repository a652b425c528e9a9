"""The workloads that are tuned for when nobody names others, the most valuable first. Pure.

Sizes of transformer layers and squares, since those are what is asked for; then what shows each arithmetic's few rows,
middle sizes, long sums, batches, and layouts that fewer binaries are built for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from tilewire.kernels.autotune.workloads import Product, Rows, Sum, Workload

_WEIGHTS = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (11008, 4096), (512, 512))
_FEW_ROWS = (1, 16, 32, 64, 8)
_TALL = (
    *((4096, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048), (1024, 1024, 1024), (256, 4096, 4096)),
    *((512, 512, 512), (4864, 4096, 4096), (1024, 4096, 4096), (256, 11008, 4096), (512, 4096, 14336)),
    *((128, 4096, 4096), (128, 128, 16384), (1024, 1024, 4096), (1823, 781, 1000), (320, 320, 320)),
    *((2048, 11008, 4096), (768, 3072, 768), (4096, 4096, 65), (192, 1536, 6144), (3000, 600, 300)),
)
_BATCHED = ((64, 128, 128, 128), (32, 1024, 1024, 1024), (256, 64, 64, 64))
_ROW_LENGTHS = (4096, 1024, 8192, 2048, 256, 512, 16384, 32768, 781, 128)
_LONG_ROWS = ((4096, 65536), (4096, 131072), (1, 1 << 20), (8, 32768), (64, 131072), (1, 50257))
# Read element by element, and of fewer rows: most lengths that people have are no multiple of anything.
_ODD_ROWS = (
    *((4096, 50257), (64, 50257), (1024, 1001), (512, 150), (8192, 150), (2048, 35163), (1024, 387), (256, 2379)),
    *((1024, 30), (1024, 6001), (4096, 2379), (512, 1370), (256, 14001), (8192, 387), (128, 35997), (1024, 28001)),
    *((16, 201), (4096, 65), (1024, 100001), (64, 11111)),
)
_ADD_SIZES = (
    *(1 << 20, 1 << 16, 1 << 24, 1 << 12, 1 << 22, 1 << 26, 1 << 18, 1 << 27, 1 << 14),
    # What is best for powers of two alone is not for the sizes between.
    *(57_246, 204_280, 11_136, 700_001, 40_000, 3_000_001),
)
_KINDS = (
    Product(1, 1, 1, dtype="bfloat16"),
    Product(1, 1, 1, dtype="float32", precision="tf32", b_major="k"),
    Product(1, 1, 1, dtype="int8", b_major="k"),
    Product(1, 1, 1, dtype="float8_e4m3fn", b_major="k"),
    Product(1, 1, 1, dtype="float32"),
    Product(1, 1, 1, dtype="float32", precision="tf32x3", b_major="k"),
)


@functools.cache
def defaults() -> tuple[Workload, ...]:
    """All of them: each op's and arithmetic's in order of value."""
    return (*(each for kind in _KINDS for each in _products(kind)), *_softmaxes(), *_additions())


def _products(kind: Product) -> Iterator[Product]:
    is_half = kind.dtype == "bfloat16"
    # Where the matrix unit is slow or of little use, fewer sizes say as much.
    tall = [size for size in _TALL if is_half or (size != (8192,) * 3 and kind.precision == "tf32")] or _TALL[2:13]
    if not is_half and kind.dtype != "float32":
        tall = list(_TALL[:14])
    for (n, k), m in ((weight, m) for m in _FEW_ROWS for weight in (_WEIGHTS if is_half else _WEIGHTS[:4])):
        yield replace(kind, m=m, n=n, k=k)
    for m, n, k in tall:
        yield replace(kind, m=m, n=n, k=k)
        if is_half and min(m, n, k) >= 1024:
            yield replace(kind, m=m, n=n, k=k, b_major="k")
    for batch, m, n, k in _BATCHED:
        yield replace(kind, m=m, n=n, k=k, batch=batch)
    yield from _in_other_ways(kind)


def _in_other_ways(kind: Product) -> Iterator[Product]:
    """Layouts, outputs and epilogues for which only some binaries are built."""
    square, tall = replace(kind, m=2048, n=2048, k=2048), replace(kind, m=1000, n=1001, k=1000)
    yield tall
    yield replace(square, activation="relu")
    if kind.dtype == "bfloat16":
        yield replace(square, a_major="m")
        yield replace(square, out_dtype="float32")
        yield replace(square, m=256, a_major="m")
        yield replace(square, m=512, n=1024, activation="gelu")


def _softmaxes() -> Iterator[Rows]:
    for dtype in ("float32", "bfloat16"):
        yield from (Rows(4096, n, dtype) for n in _ROW_LENGTHS)
        yield from (Rows(rows, n, dtype) for rows, n in (*_LONG_ROWS, *_ODD_ROWS))


def _additions() -> Iterator[Sum]:
    for n in _ADD_SIZES:
        yield Sum(1, n, "float32")
        yield Sum(1, n, "bfloat16")
