"""Small products and narrow ones for the tests of `matmul_element_kernel`. Imports no test framework."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tests.support.matmul_reference import matmul_reference
from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.matmul.plan import Epilogue, prepare

# Batch dimensions, M, N and K: single elements, vectors, less and more than a side of a square, ends within programs.
SHAPES = (
    ((), 1, 1, 1),
    ((), 3, 7, 5),
    ((35,), 2, 2, 3),
    ((2, 3), 4, 5, 1),
    ((), 140, 1, 33),
    ((2,), 1, 70, 40),
    ((3,), 9, 3, 20),
    ((), 6, 5, 0),
)
DTYPES = (
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("float32", "float32"),
    ("int8", "int32"),
    ("int8", "float16"),
    ("float8_e4m3fn", "bfloat16"),
)


@dataclass(frozen=True)
class SmallProduct:
    """A product, and the operands of its epilogue."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue

    def launch(self, config: Config) -> torch.Tensor:
        """The output by the tile of `config`."""
        spec = self.epilogue
        operands = (self.a, self.b, self.out, spec.bias, spec.a_scale, spec.b_scale)
        prepare(self.a, self.b, self.out, spec, "ieee", config)(*operands)
        return self.out

    def expected(self) -> torch.Tensor:
        """The result in float64, which is exact."""
        spec = self.epilogue
        named = {"bias": spec.bias, "a_scale": spec.a_scale, "b_scale": spec.b_scale}
        return matmul_reference(self.a, self.b, activation=spec.activation, **named)


def small_products(
    shape: tuple[tuple[int, ...], int, int, int], dtype: str, out_dtype: str, generator: torch.Generator
) -> Iterator[SmallProduct]:
    """The product of `shape` with operands in rows, in columns, in neither, and with one that repeats; whole numbers."""
    batch, m, n, k = shape
    device = generator.device
    a, b = _whole((*batch, m, k), dtype, generator), _whole((*batch, k, n), dtype, generator)
    turned = [tensor.mT.contiguous().mT for tensor in (a, b)]
    apart = [tensor.repeat_interleave(3, -1)[..., ::3] for tensor in (a, b)]
    one = _whole((k, n), dtype, generator).expand(*batch, k, n)
    bias = _whole((n,), "float32", generator).to(torch.int32 if out_dtype == "int32" else torch.float32)
    scale = torch.randint(1, 3, (m,), device=device, generator=generator).float()
    a_scale, b_scale = (None, None) if out_dtype == "int32" else (scale, torch.full((1,), 2.0, device=device))
    cases = [
        (a, b, Epilogue()),
        (turned[0], turned[1], Epilogue(bias, a_scale, b_scale, "relu")),
        (apart[0], turned[1], Epilogue(bias)),
        (turned[0], apart[1], Epilogue(None, a_scale, b_scale)),
        (a, one, Epilogue()),
    ]
    for first, second, epilogue in cases:
        whole = torch.full((*batch, m, n + 3), -7, dtype=getattr(torch, out_dtype), device=device)
        yield SmallProduct(first, second, whole[..., 1 : n + 1], epilogue)


def _whole(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    values = torch.randint(-2, 3, shape, device=generator.device, generator=generator)
    return values.to(getattr(torch, dtype))
