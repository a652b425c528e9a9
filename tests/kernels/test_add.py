"""add in the interpreter, against exact arithmetic: dtypes, broadcasting, strides, alpha."""

import pytest
import torch

from tests.support.kernel_bounds import poisoned, rounding_bound
from tilewire.kernels import add
from tilewire.kernels.add.op import DTYPES

ALL = [getattr(torch, name) for name in DTYPES]
COMPUTED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def check(out, a, b, alpha=1):
    expected = a.double() + alpha * b.double() if a.is_floating_point() else a.long() + int(alpha) * b.long()
    assert out.shape == expected.shape
    if not out.is_floating_point():
        assert torch.equal(out, expected.to(out.dtype))
        return
    computed = COMPUTED_AS.get(a.dtype, a.dtype)
    parts = a.double().abs() + abs(alpha) * b.double().abs()
    bound = rounding_bound(2 * parts, computed) + rounding_bound(expected, out.dtype)
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261121)


def operand(shape, dtype, generator):
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("alpha", [1, -3])
def test_dtypes(dtype, n, alpha, generator):
    a, b = operand(n, dtype, generator), operand(n, dtype, generator)
    out = poisoned((n,), dtype)
    assert add(a, b, alpha=alpha, out=out) is out
    check(out, a, b, alpha)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((7, 40), (40,)),
        ((7, 40), (7, 1)),
        ((7, 1), (1, 40)),
        ((), (5,)),
        ((), ()),
        ((3, 1, 5), (2, 3, 4, 1)),
        ((2, 1, 2, 1, 2), (1, 3, 1, 3, 1)),
        ((2, 3, 2, 3, 2, 3), (3, 1, 3, 1, 3)),
    ],
)
def test_broadcasting(shape_a, shape_b, generator):
    a, b = operand(shape_a, torch.float32, generator), operand(shape_b, torch.float32, generator)
    check(add(a, b, alpha=0.5), a, b, 0.5)
    check(add(b, a), b, a)


def test_any_strides(generator):
    a = operand((30, 40), torch.float32, generator)[::3, 5:25:2].T
    b = operand((10, 20), torch.float32, generator)[:, ::2].T
    whole = poisoned((10, 40), torch.float32)
    out = whole[:, ::4]
    add(a, b.T.contiguous().T, out=out.T)
    check(out.T, a, b)
    assert whole[:, 1::4].isnan().all()


@pytest.mark.parametrize("out_dtype", ALL)
def test_out_dtypes(out_dtype, generator):
    a, b = operand(50, torch.int32, generator), operand(50, torch.int32, generator)
    out = add(a, b, alpha=2, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    check(out, a, b, 2)


def test_int64_is_exact():
    a = torch.tensor([2**53 + 1, -(2**62)])
    assert torch.equal(add(a, a[:1], alpha=2), a + 2 * a[:1])


def test_float64_keeps_its_alpha():
    one = torch.ones(3, dtype=torch.float64)
    assert torch.equal(add(one, one, alpha=0.1), one + 0.1)


def test_infinities_and_nan():
    a = torch.tensor([float("inf"), float("nan"), float("inf"), 1.0])
    b = torch.tensor([float("-inf"), 1.0, 1.0, float("inf")])
    torch.testing.assert_close(add(a, b), a + b, equal_nan=True)


@pytest.mark.parametrize(("shape_a", "shape_b"), [((0,), (0,)), ((0, 3), (3,)), ((4, 1), (0,))])
def test_empty(shape_a, shape_b):
    assert add(torch.ones(shape_a), torch.ones(shape_b)).numel() == 0


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((torch.ones(3), torch.ones(4)), {}, "broadcast"),
        ((torch.ones(3), torch.ones(3).half()), {}, "one dtype"),
        ((torch.ones(3).bool(), torch.ones(3).bool()), {}, "dtype"),
        ((torch.ones(3).int(), torch.ones(3).int()), {"alpha": 0.5}, "alpha"),
        ((torch.ones(3), torch.ones(3)), {"out_dtype": torch.int8}, "out_dtype"),
        ((torch.ones(3), torch.ones(3)), {"out": torch.ones(4)}, "out"),
    ],
)
def test_refuses(arguments, options, named):
    with pytest.raises(ValueError, match=named):
        add(*arguments, **options)
