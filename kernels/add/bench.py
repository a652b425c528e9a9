"""Additions as benchmarks describe them, their operands, and what PyTorch has for them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tilewire.kernels.add.op import DTYPES, Problem, choose, configs_for, prepare
from tilewire.kernels.op import Call, ShapeGroup, log_uniform
from tilewire.kernels.runtime.elementwise import Config
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import Target


@dataclass(frozen=True)
class AddShape:
    """One addition of (rows, n) and, as `b_shape` says, `full` (rows, n) or a `row` (n,)."""

    op: ClassVar[str] = "add"
    choices: ClassVar[Mapping[str, Sequence[str]]] = {"dtype": DTYPES, "b_shape": ("full", "row")}
    rows: int
    n: int
    dtype: str = "float32"
    b_shape: str = "full"

    @property
    def problem(self) -> Problem:
        """Returns the problem that the choice of blocks depends on, at addresses that divide by 16."""
        if self.b_shape == "full" or self.rows == 1:
            return Problem(1, self.rows * self.n, self.dtype, self.dtype)
        is_aligned = self.n % (16 // ITEM_BYTES[self.dtype]) == 0
        return Problem(self.rows, self.n, self.dtype, self.dtype, is_aligned, outer_rank=1)

    @property
    def num_bytes(self) -> int:
        """Each operand read once and the output written once."""
        num_read = self.n if self.b_shape == "row" else self.rows * self.n
        return (2 * self.rows * self.n + num_read) * ITEM_BYTES[self.dtype]

    def check(self) -> None:
        """Checks that the fields agree; raises `ShapeError`."""

    def chosen(self, target: Target) -> Config:
        """Returns the configuration that dispatch gives this shape."""
        return choose(self.problem, target)

    def candidates(self, target: Target) -> list[Config]:
        """Yields every configuration of the catalogue that computes this shape."""
        return configs_for(self.problem.specialization, target)


def _draw(generator: random.Random) -> AddShape:
    """A random addition, log-uniform in size."""
    return AddShape(
        rows=log_uniform(generator, 1, 8192),
        n=log_uniform(generator, 16, 1 << 16),
        dtype=generator.choice(["float32", "bfloat16", "float16"]),
        b_shape=generator.choice(["full", "row"]),
    )


def _draw_flat(generator: random.Random) -> AddShape:
    """A random addition of one row, log-uniform in size."""
    return AddShape(1, log_uniform(generator, 1 << 10, 1 << 26), generator.choice(["float32", "bfloat16"]))


GROUPS = (ShapeGroup("add", _draw, 30), ShapeGroup("add flat", _draw_flat, 10))


class AddOperands:
    """Operand sets of one addition, for timing."""

    def __init__(self, shape: AddShape, num_sets: int, generator: torch.Generator) -> None:
        dtype = getattr(torch, shape.dtype)
        full = (shape.rows, shape.n)

        def values(extents: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(extents, generator=generator, device=generator.device).mul_(100).to(dtype)

        b_extents = full if shape.b_shape == "full" else (shape.n,)
        self._sets = [(values(full), values(b_extents), values(full)) for _ in range(num_sets)]

    def launcher(self, config: Config | None) -> Call:
        """Returns a call that launches one configuration, or the chosen one."""
        prepared, sets = prepare(*self._sets[0], config=config), self._sets
        return lambda index: prepared(*sets[index])

    def vendors(self) -> dict[str, Call]:
        """Returns calls of PyTorch for the same shape, by name."""
        sets = self._sets
        return {"torch": lambda index: torch.add(sets[index][0], sets[index][1], out=sets[index][2])}

    def error(self) -> torch.Tensor | None:
        """Returns the relative error of the first set's output."""
        a, b, out = self._sets[0]
        expected = a.double() + b.double()
        error: torch.Tensor = (out.double() - expected).norm() / expected.norm()
        return error

    def poison(self) -> None:
        """Overwrites the first set's output."""
        self._sets[0][-1].fill_(torch.nan)
