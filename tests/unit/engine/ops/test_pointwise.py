"""Functions of elements on the CPU backend against float64: each function, broadcasting, scale and shift, special values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.op_bench import OpBench
from tilewire.service.errors import InvalidRequest
from tilewire.service.ops.pointwise import BINARY


def sigmoid(x: np.ndarray) -> np.ndarray:
    quotient: np.ndarray = 1 / (1 + np.exp(-x))
    return quotient


def gelu(x: np.ndarray) -> np.ndarray:
    product: np.ndarray = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return product


ORACLES: dict[str, Callable[..., np.ndarray]] = {
    "mul": np.multiply,
    "sub": np.subtract,
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "abs": np.abs,
    "neg": np.negative,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": gelu,
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
}
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, 1e-30, 80.0, -80.0])


@pytest.fixture
def bench() -> OpBench:
    return OpBench()


@pytest.mark.parametrize("fn", ORACLES)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 3e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_each_function_against_float64(bench: OpBench, fn: str, dtype: torch.dtype, rtol: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x = (torch.rand((5, 33), generator=generator) * 4 + 0.1).to(dtype)
    operands = {"x": x} | ({"y": torch.randn((5, 33), generator=generator).to(dtype)} if fn in BINARY else {})
    (out,) = bench.run("pointwise", operands, fn=fn)
    wanted = ORACLES[fn](*(one.double().numpy() for one in operands.values()))
    assert out.dtype == dtype
    np.testing.assert_allclose(out.double(), wanted, rtol=rtol, atol=rtol)
    (out,) = bench.run("pointwise", operands, fn=fn, scale=-0.5, shift=3, out_dtype="float32")
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out, wanted * -0.5 + 3, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("fn", ORACLES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_infinity_and_zeros_follow_the_mathematics(bench: OpBench, fn: str) -> None:
    operands = {"x": SPECIAL} | ({"y": SPECIAL.flip(0)} if fn in BINARY else {})
    (out,) = bench.run("pointwise", operands, fn=fn)
    wanted = ORACLES[fn](*(one.double().numpy() for one in operands.values()))
    if fn in ("gelu", "silu"):
        # Their limit; the formula gives NaN.
        wanted[2] = 0
        out = torch.where(torch.tensor([number == 2 for number in range(len(out))]), torch.nan_to_num(out), out)
    np.testing.assert_allclose(out.double(), wanted.astype(np.float32), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(("x", "y"), [((5, 1), (7,)), ((2, 3, 4), (3, 1)), ((), (3,)), ((3,), ()), ((0,), (1,))])
def test_broadcasting_is_numpys(bench: OpBench, x: tuple[int, ...], y: tuple[int, ...]) -> None:
    operands = {"x": torch.randn(x), "y": torch.randn(y)}
    (out,) = bench.run("pointwise", operands, fn="sub")
    np.testing.assert_array_equal(out, operands["x"].numpy() - operands["y"].numpy())


def test_elements_share_a_launch(bench: OpBench) -> None:
    shapes = [(5,), (2, 3), (), (4, 1, 7)]
    bench.check_batch([bench.sent("pointwise", {"x": torch.randn(shape)}, fn="tanh", scale=2) for shape in shapes])
    pairs = [{name: torch.randn(shape) for name in ("x", "y")} for shape in shapes]
    bench.check_batch([bench.sent("pointwise", pair, fn="div") for pair in pairs])
    x = torch.ones(4)
    changes: list[dict[str, object]] = [{}, {"fn": "exp"}, {"scale": 2}, {"shift": 1}, {"shift": "-0.0"}]
    keys = [bench.sent("pointwise", {"x": x}, **{"fn": "tanh", **change}).key for change in changes]
    assert len({*keys, None}) == len(keys) + 1
    assert bench.sent("pointwise", {"x": x, "y": torch.ones(())}, fn="mul").key is None
    assert bench.sent("pointwise", {"x": x}, {"y": x}, fn="mul").key is None


@pytest.mark.parametrize(
    ("inputs", "options", "name"),
    [
        ({"x": torch.ones(2)}, {}, "fn"),
        ({"x": torch.ones(2)}, {"fn": "sin"}, "fn"),
        ({"x": torch.ones(2)}, {"fn": "mul"}, "y"),
        ({"x": torch.ones(2), "y": torch.ones(2)}, {"fn": "exp"}, "y"),
        ({"x": torch.ones(2), "y": torch.ones(3)}, {"fn": "mul"}, "y"),
        ({"x": torch.ones(2), "y": torch.ones(2).half()}, {"fn": "mul"}, "y"),
        ({"x": torch.ones(2)}, {"fn": "exp", "scale": "much"}, "scale"),
        ({"x": torch.ones(2)}, {"fn": "exp", "out_dtype": "int64"}, "out_dtype"),
        ({"x": torch.ones(2).double()}, {"fn": "exp"}, "x"),
    ],
)
def test_bad_requests_name_the_field(
    bench: OpBench, inputs: dict[str, torch.Tensor], options: dict[str, object], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}:"):
        bench.run("pointwise", inputs, **options)
