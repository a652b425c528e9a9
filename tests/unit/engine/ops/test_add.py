"""Scaled sums as the CPU computes them; that they are right otherwise is tested over HTTP."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.op_bench import OpBench


@pytest.fixture
def bench() -> OpBench:
    return OpBench()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alpha", [1e308, -3.5e38])
def test_a_factor_beyond_float32_is_infinite_to_it(bench: OpBench, dtype: torch.dtype, alpha: float) -> None:
    x = torch.tensor([-1, 2], dtype=dtype)
    (out,) = bench.run("add", {"a": x, "b": x}, alpha=alpha)
    np.testing.assert_array_equal(out.float(), np.sign([-alpha, alpha]) * np.inf)


def test_a_factor_of_float64_has_its_range(bench: OpBench) -> None:
    x = torch.ones(1, dtype=torch.float64)
    (out,) = bench.run("add", {"a": x, "b": x}, alpha=1e308)
    assert out.item() == 1e308


@pytest.mark.parametrize("shape", [(8, 8), (8, 1), (1, 8), (1, 1)])
def test_a_product_is_not_rounded_before_the_sum(bench: OpBench, shape: tuple[int, int]) -> None:
    """Also where torch takes a loop without fused products, as for short rows of a broadcast operand."""
    alpha = float(np.float32(-2.7))
    b = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    a = np.broadcast_to((-alpha * b).astype(np.float32), (8, 8)).copy()
    exact = a.astype(np.float64) + alpha * b.astype(np.float64)
    (out,) = bench.run("add", {"a": torch.from_numpy(a), "b": torch.from_numpy(b)}, alpha=alpha)
    np.testing.assert_allclose(out.numpy(), exact, rtol=2.0**-22, atol=0)
