"""Products of int8 on the CPU backend: exact on both ways, at the limits of sums, in any layout, for batches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
import torch

from tilewire.service.engine.ops.narrow import MAX_EXACT_K, has_int8_dot, multiply_int8, multiply_int8_by_parts
from tilewire.service.ops.matmul import MAX_INT8_K

Multiply: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def integers(*shape: int, seed: int) -> torch.Tensor:
    """All of int8."""
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def check(multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> None:
    found = multiply(a, b)
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found.numpy(), a.numpy().astype(np.int64) @ b.numpy().astype(np.int64))


@pytest.fixture(params=[multiply_int8, multiply_int8_by_parts])
def multiply_by(request: pytest.FixtureRequest) -> Multiply:
    chosen: Multiply = request.param
    return chosen


@pytest.mark.parametrize("k", [0, 1, 2, MAX_EXACT_K, MAX_EXACT_K + 1, 5 * MAX_EXACT_K + 3, MAX_INT8_K])
@pytest.mark.parametrize("ends", [(-128, -128), (-128, 127), (127, 127)])
def test_sums_are_exact_up_to_those_that_int32_holds(multiply_by: Multiply, k: int, ends: tuple[int, int]) -> None:
    """Where two products are added in 16 bits these saturate."""
    a, b = integers(3, k, seed=k), integers(k, 4, seed=k + 1)
    a[0], b[:, 0] = ends
    check(multiply_by, a, b)


@pytest.mark.parametrize("shape", [(0, 5, 7), (1, 5, 0), (1, 1, 1), (17, 33, 65), (64, 300, 130)])
def test_any_shape_and_layout(multiply_by: Multiply, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = integers(m, k, seed=1), integers(k, n, seed=2)
    check(multiply_by, a, b)
    check(multiply_by, a.mT.contiguous().mT, b.mT.contiguous().mT)
    check(multiply_by, integers(2 * m, 3 * k, seed=3)[::2, ::3], integers(2 * k, n, seed=4)[::2])
    check(multiply_by, a[:1].expand(m, k), b[:, :1].expand(k, n))


def test_batches_of_either_operand(multiply_by: Multiply) -> None:
    a, b = integers(2, 3, 4, 50, seed=1), integers(3, 50, 6, seed=2)
    check(multiply_by, a, b[0])
    check(multiply_by, a, b)
    check(multiply_by, a[0, 0], b)


def test_batches_of_the_second_operand_are_multiplied_by_parts() -> None:
    assert not has_int8_dot(integers(2, 3, 4, seed=1))
    assert not has_int8_dot(torch.ones(3, 4))


@pytest.mark.parametrize("instructions", ["AVX512_CORE", "AVX2"])
def test_a_library_that_does_without_the_instruction_is_not_trusted(instructions: str) -> None:
    """As on older processors, whose product of these saturates."""
    code = (
        "import torch; from tilewire.service.engine.ops.narrow import multiply_int8; "
        "a = torch.full((64, 64), 127, dtype=torch.int8); assert (multiply_int8(a, a) == 64 * 127**2).all()"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=True, timeout=120)
