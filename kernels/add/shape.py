"""Additions as benchmarks and tuning describe them. Pure: no device."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilewire.kernels.add.configs import DTYPES, Problem, choose, configs_for
from tilewire.kernels.op import ShapeGroup, log_uniform
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


def draw(generator: random.Random) -> AddShape:
    """A random addition, log-uniform in size."""
    return AddShape(
        rows=log_uniform(generator, 1, 8192),
        n=log_uniform(generator, 16, 1 << 16),
        dtype=generator.choice(["float32", "bfloat16", "float16"]),
        b_shape=generator.choice(["full", "row"]),
    )


GROUPS = (
    ShapeGroup(
        "add",
        lambda generator: AddShape(
            1, log_uniform(generator, 1 << 10, 1 << 26), generator.choice(["float32", "bfloat16"])
        ),
        10,
    ),
)
