"""Operands of products for timing, and what PyTorch has for them."""

from __future__ import annotations

import torch

from tilewire.kernels.build.operands import empty_at, random_at
from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.matmul.plan import Epilogue, prepare
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.op import Call


class MatmulOperands:
    """See `Operands`."""

    def __init__(self, shape: MatmulShape, num_sets: int, generator: torch.Generator) -> None:
        of_a, of_b, of_out = shape.extents
        self._shape = shape
        self._sets = [
            (
                random_at(of_a, shape.dtype, generator),
                random_at(of_b, shape.dtype, generator),
                empty_at(of_out, shape.stored_dtype, generator),
            )
            for _ in range(num_sets)
        ]
        self._epilogue = Epilogue()
        if not shape.is_plain:
            bias_dtype = torch.int32 if shape.stored_dtype == "int32" else torch.float32
            bias = torch.ones(shape.n, dtype=bias_dtype, device=generator.device)
            self._epilogue = Epilogue(bias, activation=shape.activation)

    def launcher(self, config: Config | None) -> Call:
        """See `Operands`."""
        prepared = prepare(*self._sets[0], self._epilogue, self._shape.precision, config)
        assert prepared is not None, "This is a bug."
        sets, bias = self._sets, self._epilogue.bias
        return lambda index: prepared(*sets[index], bias, None, None)

    def vendor(self) -> Call | None:
        """See `Operands`: the product alone, without what follows it."""
        shape, sets = self._shape, self._sets
        dtype, stored = getattr(torch, shape.dtype), getattr(torch, shape.stored_dtype)
        if shape.dtype.startswith("float8"):
            one = torch.ones((), device=sets[0][0].device)
            if shape.batch > 1:
                return None
            return lambda index: torch._scaled_mm(*sets[index][:2], one, one, out_dtype=stored)
        if shape.dtype == "int8":
            return None if shape.batch > 1 else lambda index: torch._int_mm(*sets[index][:2])
        if dtype != stored or shape.precision == "tf32x3":
            return None
        multiply = torch.mm if shape.batch == 1 else torch.bmm

        def call(index: int) -> None:
            a, b, out = sets[index]
            torch.backends.cuda.matmul.allow_tf32 = shape.precision == "tf32"
            multiply(a, b, out=out)

        return call
