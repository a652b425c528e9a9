"""Operands of products for timing, and what PyTorch has for them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from tilewire.kernels.build.operands import empty_at, random_at
from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.matmul.plan import Epilogue, prepare
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.op import Call

# A product of operand set number so and so, and its output.
Multiply: TypeAlias = Callable[[int], torch.Tensor]

# PyTorch's activations, in place, and those that its product can have as a part.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "relu": torch.relu_,
    "leaky_relu": torch.nn.functional.leaky_relu_,
    "gelu": lambda x: x.copy_(torch.nn.functional.gelu(x, approximate="tanh")),
    "silu": lambda x: torch.nn.functional.silu(x, inplace=True),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}
_FUSED = ("relu", "gelu")


def _searched(sets: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, Multiply]:
    """CuBLASLt with its heuristics' proposals timed; nothing where `nvmath-python` is not installed."""
    if importlib.util.find_spec("nvmath") is None or sets[0][0].device.type != "cuda":
        return {}
    product = importlib.import_module("nvmath.linalg.advanced").Matmul(*sets[0][:2])
    product.plan()
    product.autotune(iterations=5)

    def call(index: int) -> torch.Tensor:
        a, b = sets[index][:2]
        product.reset_operands(a=a, b=b)
        found: torch.Tensor = product.execute()
        return found

    return {"cublaslt searched": call}


class MatmulOperands:
    """Operand sets of one product, for timing."""

    def __init__(self, shape: MatmulShape, num_sets: int, generator: torch.Generator) -> None:
        of_a, of_b, of_out = shape.extents
        self._shape = shape
        a, b = (random_at(extent, shape.dtype, generator) for extent in (of_a, of_b))
        # Drawing values takes longer than copying them, and lies between two requests in a race.
        copies = (
            (empty_at(of_a, shape.dtype, generator).copy_(a), empty_at(of_b, shape.dtype, generator).copy_(b))
            for _ in range(num_sets - 1)
        )
        self._sets = [(*operands, empty_at(of_out, shape.stored_dtype, generator)) for operands in ((a, b), *copies)]
        self._expected: torch.Tensor | None = None
        self._epilogue = Epilogue()
        if not shape.is_plain:
            bias_dtype = torch.int32 if shape.stored_dtype == "int32" else torch.float32
            bias = torch.ones(shape.n, dtype=bias_dtype, device=generator.device)
            self._epilogue = Epilogue(bias, activation=shape.activation)

    def launcher(self, config: Config | None) -> Call:
        prepared = prepare(*self._sets[0], self._epilogue, self._shape.precision, config)
        sets, bias = self._sets, self._epilogue.bias
        return lambda index: prepared(*sets[index], bias, None, None)

    def vendors(self) -> dict[str, Call]:
        """Returns calls of other libraries; PyTorch's bias and activation follow their products where ours do."""
        if self._shape.is_plain:
            return dict(self._products())
        bias, activate = self._epilogue.bias, _ACTIVATIONS[self._shape.activation]
        assert bias is not None, "This is a bug."

        def finished(index: int, *, multiply: Multiply) -> None:
            out = multiply(index)
            activate(out.add_(bias))

        found: dict[str, Call] = {
            name: functools.partial(finished, multiply=multiply) for name, multiply in self._products().items()
        }
        a, _, out = self._sets[0]
        if a.dtype == out.dtype and a.dim() == 2 and self._shape.activation in _FUSED:
            near = bias.to(out.dtype)

            def fused(index: int) -> None:
                a, b, out = self._sets[index]
                torch._addmm_activation(near, a, b, use_gelu=self._shape.activation == "gelu", out=out)

            found["torch fused"] = fused
        return found

    def _products(self) -> dict[str, Multiply]:
        """Other libraries' products alone."""
        shape, sets = self._shape, self._sets
        stored = getattr(torch, shape.stored_dtype)
        if shape.dtype.startswith("float8"):
            one = torch.ones((), device=sets[0][0].device)

            def scaled(index: int, *, is_fast: bool) -> torch.Tensor:
                return torch._scaled_mm(*sets[index][:2], one, one, out_dtype=stored, use_fast_accum=is_fast)

            is_fast = shape.precision == "fast"
            return {"torch": functools.partial(scaled, is_fast=is_fast)} if shape.batch == 1 else {}
        if shape.dtype == "int8":
            return {"torch": lambda index: torch._int_mm(*sets[index][:2])} if shape.batch == 1 else {}
        if shape.dtype != shape.stored_dtype:
            return {}
        multiply = torch.mm if shape.batch == 1 else torch.bmm

        def call(index: int, *, library: str) -> torch.Tensor:
            a, b, out = sets[index]
            torch.backends.cuda.matmul.allow_tf32 = shape.precision == "tf32"
            torch.backends.cuda.preferred_blas_library(library)
            return multiply(a, b, out=out)

        return {
            "torch": functools.partial(call, library="cublas"),
            "torch lt": functools.partial(call, library="cublaslt"),
        } | _searched(sets)

    def error(self) -> torch.Tensor | None:
        if not self._shape.is_plain:
            return None
        a, b, out = self._sets[0]
        wide = torch.float64 if a.dtype in (torch.int8, torch.float32) else torch.float32
        if self._expected is None:
            torch.backends.cuda.matmul.allow_tf32 = False
            self._expected = torch.matmul(a.to(wide), b.to(wide))
        error: torch.Tensor = (out.to(wide) - self._expected).norm() / self._expected.norm()
        return error

    @property
    def output(self) -> torch.Tensor:
        """The first set's output."""
        return self._sets[0][2]

    def poison(self) -> None:
        out = self.output
        out.fill_(float("nan") if out.dtype.is_floating_point else -7)
