"""pointwise in the interpreter, against float64: functions, broadcasting, strides, dtypes, hostile values."""

import pytest
import torch

from tilewire.kernels.pointwise.op import BINARY, UNARY, pointwise, pointwise_reference, prepare_pointwise

INF, NAN = float("inf"), float("nan")
HOSTILE = torch.tensor([0.0, -0.0, 1, -1, INF, -INF, NAN, 88.5, -87, -100, 1e-3, -1e-3, 30, -30, 1e-30, 3e38])
# The interpreter cuts bfloat16 off instead of rounding it.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check(x, fn, *, y=None, out_dtype=None, **options):
    out = pointwise(x, fn, y=y, out_dtype=out_dtype, **options)
    expected = pointwise_reference(x, fn, y=y, **options)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(
        out.double(), expected.to(out.dtype).double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261122)


@pytest.mark.parametrize("fn", UNARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_functions_of_one(fn, dtype, generator):
    check(torch.randn((3, 70), generator=generator).to(dtype), fn, scale=2.0, shift=-0.5)
    check(HOSTILE.to(dtype), fn, out_dtype=torch.float32)


@pytest.mark.parametrize("fn", BINARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_functions_of_two(fn, dtype, generator):
    x, y = (torch.randn((3, 70), generator=generator).to(dtype) for _ in "xy")
    check(x, fn, y=y, scale=-1.5, shift=2.0)
    check(HOSTILE.to(dtype)[:, None], fn, y=HOSTILE.to(dtype), out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("first", "second"),
    [((3, 1), (8,)), ((3, 64), (64,)), ((16, 1), (16, 32)), ((2, 1, 3, 1, 2, 1, 2), (1, 2, 1, 2, 1, 2, 1)), ((), (5,))],
)
def test_broadcasting(first, second, generator):
    x, y = torch.randn(first, generator=generator), torch.randn(second, generator=generator)
    check(x, "sub", y=y)
    check(y, "sub", y=x)


def test_strides(generator):
    x = torch.randn((4, 6, 10), generator=generator)
    check(x.transpose(0, 2), "exp")
    check(x[:, ::2, ::3], "mul", y=x[:, 1::2, 1:5])
    whole = torch.full((6, 20), NAN)
    prepare_pointwise(x[0], whole[:, ::2], fn="neg")(x[0], None, whole[:, ::2])
    assert torch.equal(whole[:, ::2], -x[0])
    assert whole[:, 1::2].isnan().all()


def test_exponentials_keep_their_bits_at_any_magnitude():
    x = torch.linspace(-87, 88, 501)
    expected = x.double().exp()
    assert ((pointwise(x, "exp").double() - expected).abs() <= 3e-7 * expected).all()


def test_empty():
    assert pointwise(torch.empty(0, 5), "mul", y=torch.ones(5)).shape == (0, 5)


@pytest.mark.parametrize(
    ("x", "fn", "options", "named"),
    [
        (torch.ones(3, dtype=torch.int32), "exp", {}, "x"),
        (torch.ones(3), "mul", {}, "fn"),
        (torch.ones(3), "exp", {"y": torch.ones(3)}, "fn"),
        (torch.ones(3), "mul", {"y": torch.ones(3).half()}, "x and y"),
        (torch.ones(3), "mul", {"y": torch.ones(4)}, "broadcast"),
        (torch.ones(3), "exp", {"out_dtype": torch.int32}, "out"),
    ],
)
def test_refuses(x, fn, options, named):
    with pytest.raises(ValueError, match=named):
        pointwise(x, fn, **options)
