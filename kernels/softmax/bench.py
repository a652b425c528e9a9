"""Operands of softmaxes for timing, and what PyTorch has for them."""

from __future__ import annotations

import torch

from tilewire.kernels.build.operands import empty_at, random_at
from tilewire.kernels.op import Call
from tilewire.kernels.softmax.configs import Config
from tilewire.kernels.softmax.op import prepare
from tilewire.kernels.softmax.shape import SoftmaxShape


class SoftmaxOperands:
    """Operand sets of one softmax, for timing."""

    def __init__(self, shape: SoftmaxShape, num_sets: int, generator: torch.Generator) -> None:
        self._sets = [
            (random_at(shape.extent, shape.dtype, generator), empty_at(shape.extent, shape.stored_dtype, generator))
            for _ in range(num_sets)
        ]

    def launcher(self, config: Config | None) -> Call:
        """Returns a call that launches one configuration, or the chosen one."""
        prepared, sets = prepare(*self._sets[0], config=config), self._sets
        return lambda index: prepared(*sets[index])

    def vendors(self) -> dict[str, Call]:
        """Returns calls of PyTorch for the same shape, by name."""
        sets = self._sets
        if sets[0][0].dtype != sets[0][1].dtype:
            return {}
        return {"torch": lambda index: torch._softmax(sets[index][0], -1, False, out=sets[index][1])}

    def error(self) -> torch.Tensor | None:
        """Returns the relative error of the first set's output."""
        x, out = self._sets[0]
        expected = torch.softmax(x.double(), -1)
        error: torch.Tensor = (out.double() - expected).norm() / expected.norm()
        return error

    def poison(self) -> None:
        """Overwrites the first set's output."""
        self._sets[0][-1].fill_(torch.nan)
