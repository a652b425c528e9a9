"""grouped matmul in the interpreter: every product equals its own matmul's oracle."""

import pytest
import torch

from tests.support.kernel_bounds import matmul_bound
from tests.support.matmul_reference import matmul_reference
from tilewire.kernels import grouped_matmul
from tilewire.kernels.build.operands import random_operand

SHAPES = [(16, 24, 32), (1, 1, 1), (70, 65, 40), (5, 0, 8), (64, 128, 64), (3, 8, 0), (33, 17, 129)]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261121)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("b_major", ["n", "k"])
@pytest.mark.parametrize("aligned", [True, False])
def test_unequal_shapes(dtype, b_major, aligned, generator):
    shapes = [(m, n // 16 * 16, k // 16 * 16) for m, n, k in SHAPES] if aligned else SHAPES
    a = [random_operand((m, k), dtype, generator) for m, _, k in shapes]
    b = [random_operand((k, n), dtype, generator) for _, n, k in shapes]
    b = [x if b_major == "n" else x.T.contiguous().T for x in b]
    bias_dtype = torch.int32 if dtype == torch.int8 else torch.float32
    bias = [random_operand((n,), torch.float32, generator).to(bias_dtype) for _, n, _ in shapes]
    results = grouped_matmul(a, b, bias=bias, activation="relu")
    for left, right, extra, out in zip(a, b, bias, results, strict=True):
        expected = matmul_reference(left, right, bias=extra, activation="relu")
        bound = matmul_bound(left, right, expected, out.dtype, str(dtype).removeprefix("torch."))
        assert out.shape == expected.shape
        assert ((out.double() - expected).abs() <= bound + extra.abs() * 2.0**-20).all()


def test_refuses_mixed_dtypes():
    ones = torch.ones(16, 16)
    with pytest.raises(ValueError, match="dtype"):
        grouped_matmul([ones, ones.half()], [ones, ones.half()])


def test_refuses_unequal_numbers():
    with pytest.raises(ValueError, match="as many"):
        grouped_matmul([torch.ones(2, 2)], [])
