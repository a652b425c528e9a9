"""Softmaxes as benchmarks and tuning describe them: shapes, configurations worth measuring, operands."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tilewire.kernels.build.operands import empty_at, random_at
from tilewire.kernels.op import Call, ShapeGroup, Tuning, log_uniform
from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.strides import Extent
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import (
    LONGEST_ROW,
    LOOP,
    MAX_SPLITS,
    MODEL,
    SPLIT,
    Config,
    Problem,
    amounts_of,
    is_long,
    key_of,
    possible,
    power_of_two,
    select,
)
from tilewire.kernels.softmax.op import binaries, prepare


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
        return self.rows * self.n * (ITEM_BYTES[self.dtype] + ITEM_BYTES[self.stored_dtype])

    def check(self) -> None:
        """Checks that the fields agree; raises `ShapeError`."""

    def chosen(self, target: Target) -> Config:
        return select(self.problem, target)

    def candidates(self, target: Target) -> Iterator[Config]:
        return possible(self.problem, target)


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


# ── tuning ──────────────────────────────────────────────────────────────────────────────────────────


_REGISTERS_OF_SM = 65536
_THREADS_OF_SM = 2048
# Elements of a tail below which the next power of two costs no more.
_SHORTEST_TAIL = 16


def space(shape: SoftmaxShape, target: Target) -> Iterator[Config]:
    """Returns the configurations worth measuring for a shape."""
    problem = shape.problem
    if problem.is_across or not problem.is_contiguous:
        return
    if problem.n <= LONGEST_ROW:
        whole = power_of_two(problem.n)
        for block_n in {whole, max(whole, 256)}:
            yield from _rows(block_n, 0, target)
        tails = (tail for tail in (whole // 8, whole // 4) if tail >= _SHORTEST_TAIL)
        yield from itertools.chain.from_iterable(
            _rows(whole // 2, tail, target) for tail in tails if whole // 2 < problem.n <= whole // 2 + tail
        )
    if is_long(problem, target):
        yield LOOP
        splits = (1 << power for power in range(1, MAX_SPLITS.bit_length()))
        yield from (replace(SPLIT, splits=each) for each in splits if each <= -(-problem.n // SPLIT.block_n))
        yield from _cooperative(shape, target)


def _rows(block_n: int, tail_n: int, target: Target) -> Iterator[Config]:
    """Whole rows in registers: 4 to 64 elements a thread, blocks of up to 8,192 elements, or of one row."""
    max_warps = 32 if target.warp_size == 32 else 16
    for power, num_warps in itertools.product(range(12), (1, 2, 4, 8, 16, 32)):
        elements = block_n << power
        held = elements // (target.warp_size * num_warps)
        if num_warps <= max_warps and 4 <= held <= 64 and elements <= max(block_n, 8192):
            yield Config("row", 1 << power, block_n, num_warps, tail_n=tail_n)


def _cooperative(shape: SoftmaxShape, target: Target) -> Iterator[Config]:
    """A row in the registers of programs that run together; nothing where they cannot be kept so."""
    if target.backend != "cuda":
        return
    for block_n, num_warps, programs in itertools.product((4096, 8192, 16384), (4, 8, 16, 32), (1, 2, 3, 4, 8)):
        held, threads = block_n // (32 * num_warps), 32 * num_warps * programs
        registers = _REGISTERS_OF_SM // threads
        fits = threads <= _THREADS_OF_SM and registers >= held * ITEM_BYTES[shape.dtype] // 4 + 24
        group = -(-shape.n // block_n)
        if fits and 8 <= held <= 64 and 1 < group <= min(MAX_SPLITS, target.num_sms * programs):
            yield Config("cooperative", 1, block_n, num_warps, group, programs)


def binaries_of(shape: SoftmaxShape, config: Config, target: Target) -> tuple[Variant, ...]:
    """The binaries that a configuration launches for a shape: its size does not matter."""
    return tuple(binaries(replace(shape.problem, rows=1, n=1), config, target))


TUNING = Tuning(
    space=space,
    model=MODEL,
    amounts=lambda shape, config, _occupancy, target: amounts_of(shape.problem, config, target),
    key=lambda shape: "" if shape.problem.is_across or not shape.problem.is_contiguous else key_of(shape.problem),
    entry_of=lambda config: replace(config, splits=1),
    is_common=lambda shape, _target: shape.dtype == shape.stored_dtype,
    sizes=lambda _key: (0, 30, 0.0012),
    config=Config,
    keeps=True,
)


# ── operands ────────────────────────────────────────────────────────────────────────────────────────


class SoftmaxOperands:
    """Operand sets of one softmax, for timing."""

    def __init__(self, shape: SoftmaxShape, num_sets: int, generator: torch.Generator) -> None:
        self._sets = [
            (random_at(shape.extent, shape.dtype, generator), empty_at(shape.extent, shape.stored_dtype, generator))
            for _ in range(num_sets)
        ]

    def launcher(self, config: Config | None) -> Call:
        prepared, sets = prepare(*self._sets[0], config=config), self._sets
        return lambda index: prepared(*sets[index])

    def vendors(self) -> dict[str, Call]:
        sets = self._sets
        if sets[0][0].dtype != sets[0][1].dtype:
            return {}
        return {"torch": lambda index: torch._softmax(sets[index][0], -1, False, out=sets[index][1])}

    def error(self) -> torch.Tensor | None:
        x, out = self._sets[0]
        expected = torch.softmax(x.double(), -1)
        error: torch.Tensor = (out.double() - expected).norm() / expected.norm()
        return error

    def poison(self) -> None:
        self._sets[0][-1].fill_(torch.nan)
