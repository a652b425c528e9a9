"""Matrix products on the CPU backend: sums of int8 and of 16 bits, columns that are converted some at a time, memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.support.op_bench import OpBench
from tests.support.peak import begin_peak, peak_bytes
from tilewire.service.engine.ops import matmul, narrow
from tilewire.service.engine.ops.matmul import EngineMatmul
from tilewire.service.engine.ops.op import Operands
from tilewire.service.ops.matmul import MAX_INT8_K, MatmulOptions


@pytest.fixture
def bench() -> OpBench:
    return OpBench(2**26)


@pytest.mark.parametrize(
    "k", [0, 1, narrow.MAX_EXACT_K, narrow.MAX_EXACT_K + 1, 5 * narrow.MAX_EXACT_K + 3, MAX_INT8_K]
)
def test_sums_of_int8_are_exact(bench: OpBench, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8) for shape in ((3, k), (k, 4)))
    a[0], b[:, 0] = -128, -128
    (out,) = bench.run("matmul", {"a": a, "b": b})
    assert out.dtype == torch.int32
    wanted = a.numpy().astype(np.int64) @ b.numpy().astype(np.int64)
    np.testing.assert_array_equal(out.numpy(), wanted)
    (rounded,) = bench.run("matmul", {"a": a, "b": b}, out_dtype="float32")
    np.testing.assert_array_equal(rounded.numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_columns_of_a_large_operand_are_as_those_alone(bench: OpBench, name: str, *, transpose_b: bool) -> None:
    """With their bias and scales, and for batches of the other operand. Of many columns, some are computed at a time."""
    generator, dtype = torch.Generator().manual_seed(4), getattr(torch, name)
    k, n = 2100, 2 * matmul.MAX_CONVERTED // 2100 + 77
    a, b = (torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in ((2, 3, k), (k, n)))
    inputs = {"a": a, "bias": torch.randint(99, (n,), generator=generator).to(torch.int32)}
    if name != "int8":
        inputs["bias"] = inputs["bias"].half()
    if name == "float8_e4m3fn":
        inputs |= {"a_scale": torch.tensor([2.0]), "b_scale": torch.randint(1, 9, (n,), generator=generator).float()}
    options = {"transpose_b": transpose_b, "activation": "relu", "out_dtype": "int32" if name == "int8" else "float32"}
    (out,) = bench.run("matmul", inputs, {"b": b.mT.contiguous() if transpose_b else b}, **options)
    wanted = a.float() @ b.float() * inputs.get("b_scale", torch.ones(1)) * inputs.get("a_scale", torch.ones(1))
    assert torch.equal(out.float(), (wanted + inputs["bias"].float()).relu())


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_a_large_operand_is_never_there_in_wider_numbers(dtype: torch.dtype) -> None:
    a, b = torch.ones((2, 2**12), dtype=dtype), torch.ones((2**12, 2**14), dtype=dtype)
    before = begin_peak()
    (out,) = EngineMatmul().cpu(Operands({"a": a}, {"b": b}), MatmulOptions(), [torch.float32])
    assert out.unique().tolist() == [2**12]
    # All of `b` takes 256 MiB in float32. A part of it, and what the library packs, took up to 64.
    assert peak_bytes() - before < 2**27


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_a_large_operand_of_16_bits_is_not_there_twice(out_dtype: str) -> None:
    a, b = torch.ones((2, 2**12)).bfloat16(), torch.ones((2**12, 2**14)).bfloat16()
    before = begin_peak()
    (out,) = EngineMatmul().cpu(Operands({"a": a}, {"b": b}), MatmulOptions(), [getattr(torch, out_dtype)])
    assert out.unique().tolist() == [2**12]
    # `b` takes 128 MiB.
    assert peak_bytes() - before < 2**27


def check_halves(a: torch.Tensor, b: torch.Tensor) -> None:
    """Sums are those of float32, and rounded once."""
    (out,) = EngineMatmul().cpu(Operands({"a": a}, {"b": b}), MatmulOptions(), [a.dtype])
    out = out.to(a.dtype)
    exact, magnitudes = (x.double() @ y.double() for x, y in ((a, b), (a.abs(), b.abs())))
    bound = torch.finfo(a.dtype).eps / 2 * exact.abs() + (a.shape[-1] + 1) * 2.0**-24 * magnitudes
    # The least steps of the result and of the sums.
    bound += torch.finfo(a.dtype).smallest_normal * torch.finfo(a.dtype).eps / 2 + a.shape[-1] * 2.0**-149
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 5, 7), (1, 1, 1), (0, 5, 2), (3, 0, 2), (1, 4096, 133), (160, 4096, 1), (65, 300, 130)]
)
def test_products_of_16_bits_in_any_layout(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    generator = torch.Generator().manual_seed(k)
    a, b = ((torch.rand(size, generator=generator) + 0.5).to(dtype) for size in ((m, k), (k, n)))
    check_halves(a, b)
    check_halves(a.mT.contiguous().mT, b.mT.contiguous().mT)
    check_halves(a.repeat(2, 3)[::2, ::3], b.repeat(2, 1)[::2])
    check_halves(a[:1].expand(m, k) if m else a, b[:, :1].expand(k, n))
    check_halves(a.expand(2, 3, m, k), b)
    check_halves(a.expand(3, m, k), b.expand(2, 1, k, n))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    "sizes", [(1e-39, 1e10), (1e10, 1e-40), (1e-20, 1e-20), (3e-39, 0.5), (1e-30, 0.0), (1e38, 1e-38)]
)
def test_tiny_numbers_of_bfloat16_count(rows: int, sizes: tuple[float, float]) -> None:
    """Instructions for bfloat16 take numbers below 2^-126 for 0."""
    a, b = torch.full((rows, 256), sizes[0]).bfloat16(), torch.full((256, 2048), sizes[1]).bfloat16()
    check_halves(a, b)
    a[:, 1:], b[1:] = 1, 0
    check_halves(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["AVX512_CORE", "AVX2"])
def test_products_of_16_bits_where_the_library_does_without_their_instructions(instructions: str) -> None:
    code = (
        "import torch; from tests.unit.engine.ops.test_matmul import check_halves\n"
        "for dtype in (torch.bfloat16, torch.float16):\n"
        "    for m in (1, 16): check_halves((torch.rand(m, 3000) + 0.5).to(dtype), (torch.rand(3000, 20) + 0.5).to(dtype))\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
