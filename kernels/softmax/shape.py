"""Softmaxes as benchmarks and tuning describe them. Pure: no device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilewire.kernels.op import ShapeGroup, log_uniform
from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES
from tilewire.kernels.runtime.strides import Extent
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import Config, Problem
from tilewire.kernels.softmax.select import possible, select


@dataclass(frozen=True)
class SoftmaxShape:
    """One softmax over `rows` rows of `n` elements; they lie across memory unless `is_contiguous`."""

    op: ClassVar[str] = "softmax"
    choices: ClassVar[Mapping[str, Sequence[str]]] = {"dtype": FLOATS, "out_dtype": ("", *FLOATS)}
    rows: int
    n: int
    dtype: str = "float32"
    out_dtype: str = ""
    is_contiguous: bool = True

    @property
    def stored_dtype(self) -> str:
        """The dtype of the output."""
        return self.out_dtype or self.dtype

    @property
    def extent(self) -> Extent:
        """Shape and strides of input and output."""
        return Extent((self.rows, self.n), (self.n, 1) if self.is_contiguous else (1, self.rows))

    @property
    def problem(self) -> Problem:
        """Returns the problem that the choice of a kernel depends on, at addresses that divide by 16."""
        is_contiguous = self.is_contiguous or self.rows == 1 or self.n == 1
        is_aligned = is_contiguous and self.n % (16 // ITEM_BYTES[self.dtype]) == 0
        return Problem(self.rows, self.n, self.dtype, self.stored_dtype, is_contiguous, is_aligned)

    @property
    def num_bytes(self) -> int:
        """Read once and written once."""
        return self.rows * self.n * (ITEM_BYTES[self.dtype] + ITEM_BYTES[self.stored_dtype])

    def check(self) -> None:
        """Checks that the fields agree; raises `ShapeError`."""

    def chosen(self, target: Target) -> Config:
        """Returns the configuration that dispatch gives this shape."""
        return select(self.problem, target)

    def candidates(self, target: Target) -> Iterator[Config]:
        """Yields every configuration of the catalogue that computes this shape."""
        return possible(self.problem, target)


def draw(generator: random.Random) -> SoftmaxShape:
    """A random softmax, log-uniform in size."""
    return SoftmaxShape(
        rows=log_uniform(generator, 1, 8192),
        n=log_uniform(generator, 16, 1 << 17),
        dtype=generator.choice(["float32", "bfloat16", "float16"]),
        is_contiguous=generator.random() < 0.9,
    )


def _wide(generator: random.Random, least: int, largest: int) -> SoftmaxShape:
    """Rows of any length, of up to 256 MiB together."""
    n = log_uniform(generator, least, largest)
    if generator.random() < 0.6:
        n = max(8, n // 8 * 8)
    rows = log_uniform(generator, 1, max(1, min(1 << 17, (1 << 26) // n)))
    return SoftmaxShape(rows, n, generator.choice(["float32", "bfloat16"]))


GROUPS = (
    ShapeGroup("softmax", lambda generator: _wide(generator, 1, 1 << 20), 30),
    ShapeGroup("softmax narrow", lambda generator: _wide(generator, 8, 512), 20),
    ShapeGroup("softmax long", lambda generator: _wide(generator, 16384, 1 << 18), 16),
)
