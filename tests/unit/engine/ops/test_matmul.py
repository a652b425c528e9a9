"""Matrix products on the CPU backend whose operands are converted: sums of int8, some columns at a time, memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.op_bench import OpBench
from tests.support.peak import begin_peak, peak_bytes
from tilewire.service.engine.ops import int8, matmul
from tilewire.service.engine.ops.matmul import EngineMatmul
from tilewire.service.engine.ops.op import Operands
from tilewire.service.ops.matmul import MAX_INT8_K, MatmulOptions


@pytest.fixture
def bench() -> OpBench:
    return OpBench(2**26)


@pytest.mark.parametrize("k", [0, 1, int8.MAX_EXACT_K, int8.MAX_EXACT_K + 1, 5 * int8.MAX_EXACT_K + 3, MAX_INT8_K])
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
