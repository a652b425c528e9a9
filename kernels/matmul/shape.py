"""Products as benchmarks and tuning describe them. Pure: no device."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from tilewire.kernels.matmul.configs import (
    ACTIVATIONS,
    OUT_DTYPES,
    PRECISIONS,
    Config,
    Problem,
    precisions_of,
    resolved,
)
from tilewire.kernels.matmul.members import SPLITS, is_possible, members
from tilewire.kernels.matmul.select import select
from tilewire.kernels.matmul.view import problem_of, view_of
from tilewire.kernels.op import ShapeError, ShapeGroup, log_uniform
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.layouts import row_step
from tilewire.kernels.runtime.strides import Extent
from tilewire.kernels.runtime.targets import Target


@dataclass(frozen=True)
class MatmulShape:
    """One matmul: (batch, m, k) times (batch, k, n).

    Attributes:
        m: rows of `a`.
        n: columns of `b`.
        k: the summed dimension.
        batch: independent products.
        dtype: of the inputs.
        out_dtype: of the output; empty for the default.
        precision: of float32 inputs.
        a_major: the contiguous dimension of `a`, `k` or `m`.
        b_major: the contiguous dimension of `b`, `n` or `k`.
        is_padded: rows start at multiples of 16 bytes, as staging lays them; else they follow one another.
        activation: with a bias, unless it is `none`: then nothing follows the product.
    """

    op: ClassVar[str] = "matmul"
    choices: ClassVar[Mapping[str, Sequence[str]]] = {
        "dtype": tuple(OUT_DTYPES),
        "precision": PRECISIONS,
        "a_major": ("k", "m"),
        "b_major": ("n", "k"),
        "activation": ACTIVATIONS,
    }
    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bfloat16"
    out_dtype: str = ""
    precision: str = "ieee"
    a_major: str = "k"
    b_major: str = "n"
    is_padded: bool = True
    activation: str = "none"

    @property
    def stored_dtype(self) -> str:
        """The dtype of the output."""
        return self.out_dtype or OUT_DTYPES[self.dtype][0]

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows the product."""
        return self.activation == "none"

    @property
    def extents(self) -> tuple[Extent, Extent, Extent]:
        """Shapes and strides of `a`, `b` and the output."""
        a = self._extent(self.m, self.k, self.dtype, is_turned=self.a_major == "m")
        b = self._extent(self.k, self.n, self.dtype, is_turned=self.b_major == "k")
        return a, b, self._extent(self.m, self.n, self.stored_dtype, is_turned=False)

    def _extent(self, rows: int, columns: int, dtype: str, *, is_turned: bool) -> Extent:
        count, length = (columns, rows) if is_turned else (rows, columns)
        step = row_step(length, ITEM_BYTES[dtype]) if self.is_padded and length > 1 else length
        strides = (1, step) if is_turned else (step, 1)
        if self.batch == 1:
            return Extent((rows, columns), strides)
        return Extent((self.batch, rows, columns), (count * step, *strides))

    @property
    def problem(self) -> Problem:
        """Returns the problem that the choice of a kernel depends on, at addresses that divide by 16."""
        view = view_of(*self.extents, is_row_scaled=False, can_turn=self.is_plain)
        assert view is not None, "This is a bug."
        dtypes = (self.dtype, self.stored_dtype, self.precision)
        return problem_of(view, *dtypes, are_in_aligned=(True, True), is_out_aligned=True)

    @property
    def num_bytes(self) -> int:
        return self.problem.min_bytes

    def check(self) -> None:
        allowed = OUT_DTYPES[self.dtype]
        if self.stored_dtype not in allowed:
            raise ShapeError(f"out_dtype: expected one of {', '.join(allowed)}, got {self.out_dtype!r}")
        if self.precision not in precisions_of(self.dtype):
            raise ShapeError(
                f"precision: {self.dtype} has {', '.join(precisions_of(self.dtype))}, not {self.precision}"
            )
        if self.stored_dtype == "int32" and self.activation not in ("none", "relu"):
            raise ShapeError(f"activation: {self.activation} needs a floating-point output, not int32")

    def chosen(self, target: Target) -> Config:
        return select(resolved(self.problem, target), target, is_plain=self.is_plain)

    def candidates(self, target: Target) -> Iterator[Config]:
        for config, split_k, is_copied in itertools.product(_configs_of(target), SPLITS, (False, True)):
            whole = replace(config, split_k=split_k, is_copied=is_copied)
            if is_possible(resolved(self.problem, target), whole, target, is_plain=self.is_plain):
                yield whole


@functools.cache
def _configs_of(target: Target) -> tuple[Config, ...]:
    return tuple(dict.fromkeys(config for _, config in members(target)))


# Columns and sums of the layers of language models of 7 to 70 billion parameters.
_LAYERS = (
    *((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (11008, 4096), (4096, 11008), (6144, 4096)),
    *(
        (5120, 5120),
        (13824, 5120),
        (5120, 13824),
        (8192, 8192),
        (28672, 8192),
        (8192, 28672),
        (7168, 2048),
        (3584, 3584),
    ),
    *((2048, 2048), (8192, 2048), (2048, 8192), (3072, 3072), (12288, 3072), (32000, 4096)),
)


def _of(generator: random.Random, m: int, n: int, k: int, dtype: str = "", *, is_padded: bool = True) -> MatmulShape:
    """A product of these sizes in a random layout; bfloat16 where no dtype is named."""
    dtype, _, precision = (dtype or "bfloat16").partition(" ")
    is_any = dtype in ("bfloat16", "float16") or precision in ("ieee", "tf32x3")
    majors = generator.choice(["kn"] * 10 + ["kk"] * 7 + ["mn"] * 3) if is_any else "kk"
    return MatmulShape(m, n, k, 1, dtype, "", precision or "ieee", majors[0], majors[1], is_padded)


def _size(generator: random.Random, least: int, largest: int) -> int:
    """Log-uniform, in six of ten cases a multiple of 8."""
    size = log_uniform(generator, least, largest)
    return max(8, size // 8 * 8) if generator.random() < 0.6 else size


def _random(generator: random.Random, dtype: str = "", largest: int = 8192) -> MatmulShape:
    m, n, k = (_size(generator, 16, largest) for _ in range(3))
    return _of(generator, m, n, k, dtype)


def _between(generator: random.Random, least: int, largest: int, dtype: str = "") -> MatmulShape:
    m, n, k = (max(64, log_uniform(generator, least, largest) // 64 * 64) for _ in range(3))
    return _of(generator, m, n, k, dtype)


def _layer(generator: random.Random, least: int, largest: int, dtype: str = "") -> MatmulShape:
    n, k = generator.choice(_LAYERS)
    shape = _of(generator, log_uniform(generator, least, largest), n, k, dtype)
    return replace(shape, a_major="k")


def _unaligned(generator: random.Random) -> MatmulShape:
    m, n, k = (log_uniform(generator, 64, 4096) | 1 for _ in range(3))
    return _of(generator, m, n, k, is_padded=False)


def _batch(generator: random.Random) -> MatmulShape:
    """Many small products in one launch; two of three in bfloat16."""
    dtype = generator.choice(["bfloat16", "bfloat16", "bfloat16", "bfloat16", "float8_e4m3fn", "int8"])
    m, n, k = (_size(generator, 16, 1024) for _ in range(3))
    return replace(_of(generator, m, n, k, dtype), batch=log_uniform(generator, 2, 256))


# For int8, float8 and tf32: any size, large ones and layers in turn.
def _any_of(dtype: str, largest: int = 8192) -> Callable[[random.Random], MatmulShape]:
    def draw_one(generator: random.Random) -> MatmulShape:
        kind = generator.random()
        if kind < 0.4:
            return _random(generator, dtype, largest)
        return _between(generator, 256, largest, dtype) if kind < 0.7 else _layer(generator, 1, 512, dtype)

    return draw_one


def _with_epilogue(generator: random.Random) -> MatmulShape:
    """A product that a bias and an activation follow; three of seven in bfloat16."""
    kinds = ["bfloat16"] * 3 + ["float8_e4m3fn", "float8_e4m3fn fast", "float32 tf32", "int8"]
    shape = _any_of(generator.choice(kinds), 4096)(generator)
    # Sums of int8 are whole numbers.
    return replace(shape, activation="relu" if shape.dtype == "int8" else generator.choice(["relu", "gelu", "silu"]))


GROUPS = (
    ShapeGroup("random", _random, 70),
    ShapeGroup("large", lambda generator: _between(generator, 2048, 10240), 16),
    ShapeGroup("mid", lambda generator: _between(generator, 256, 2048), 36),
    ShapeGroup("skinny", lambda generator: _layer(generator, 1, 128), 50),
    ShapeGroup("layers", lambda generator: _layer(generator, 128, 4096), 20),
    ShapeGroup("unaligned", _unaligned, 10),
    # As fast as bfloat16 on every device, so that tuning measures only one of them.
    ShapeGroup("float16", _any_of("float16"), 0),
    ShapeGroup("float8", _any_of("float8_e4m3fn"), 36),
    ShapeGroup("float8 fast", _any_of("float8_e4m3fn fast"), 36),
    ShapeGroup("int8", _any_of("int8"), 34),
    ShapeGroup("tf32", _any_of("float32 tf32", 4096), 26),
    ShapeGroup("tf32x3", _any_of("float32 tf32x3", 4096), 26),
    ShapeGroup("ieee", _any_of("float32 ieee", 4096), 26),
    ShapeGroup("batched", _batch, 20),
    ShapeGroup("epilogues", _with_epilogue, 24),
)
