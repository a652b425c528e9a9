"""Operands of additions for timing, and what PyTorch has for them."""

from __future__ import annotations

import torch

from tilewire.kernels.add.op import prepare
from tilewire.kernels.add.shape import AddShape
from tilewire.kernels.op import Call
from tilewire.kernels.runtime.elementwise import Config


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
