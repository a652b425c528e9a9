"""Reductions on the CPU backend against float64: axes, ties, NaN, infinity, empty axes, odd sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.op_bench import OpBench
from tilewire.service.engine.ops.reduce import REDUCTIONS
from tilewire.service.errors import InvalidRequest


def logsumexp(x: np.ndarray, axis: int | None, keepdims: bool) -> np.ndarray:
    top = np.max(x, axis=axis, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore", over="ignore"):
        out = np.log(np.exp(x - shift).sum(axis=axis, keepdims=True)) + shift
    result: np.ndarray = out if keepdims else np.squeeze(out, axis)
    return result


ORACLES: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "argmax": np.argmax,
    "argmin": np.argmin,
    "logsumexp": logsumexp,
    "norm": lambda x, axis, keepdims: np.sqrt(np.sum(x**2, axis=axis, keepdims=keepdims)),
}
EXTREMA = ("max", "min", "argmax", "argmin")


@pytest.fixture
def bench() -> OpBench:
    return OpBench()


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize(
    ("shape", "axis"), [((1,), 0), ((5, 33), -1), ((5, 33), 0), ((3, 7, 2), 1), ((3, 7, 2), "all"), ((129,), "all")]
)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_against_float64(
    bench: OpBench,
    kind: str,
    shape: tuple[int, ...],
    axis: int | str,
    keepdims: bool,
    dtype: torch.dtype,
    rtol: float,
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    (out,) = bench.run("reduce", {"x": x}, kind=kind, axis=axis, keepdims=keepdims)
    where = None if isinstance(axis, str) else axis
    wanted = ORACLES[kind](x.double().numpy(), axis=where, keepdims=keepdims)
    assert out.shape == np.shape(wanted)
    assert out.dtype == (torch.int64 if kind.startswith("arg") else dtype)
    np.testing.assert_allclose(out.double(), wanted, rtol=rtol, atol=rtol)


def test_the_smaller_index_wins_among_equals(bench: OpBench) -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 3, (50, 1000)).astype(np.float32))
    x[:, 0] = -0.0
    for kind in ("argmax", "argmin"):
        (out,) = bench.run("reduce", {"x": x}, kind=kind)
        np.testing.assert_array_equal(out, ORACLES[kind](x.numpy(), axis=-1))


@pytest.mark.parametrize("kind", ["argmax", "argmin"])
def test_zeros_of_either_sign_are_equal(bench: OpBench, kind: str) -> None:
    x = torch.zeros(4, 100)
    x[0, ::2], x[1, 1::2], x[2, 50:], x[3, :50] = (-0.0,) * 4
    (out,) = bench.run("reduce", {"x": x}, kind=kind)
    assert out.tolist() == [0] * 4


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["argmax", "argmin"])
def test_an_index_takes_little_longer_than_its_element(kind: str) -> None:
    """Torch's take ten times as long."""
    x, seconds = (
        torch.randn((64, 4000), generator=torch.Generator().manual_seed(6)),
        dict.fromkeys(("arg", ""), math.inf),
    )
    for _ in range(20):
        for prefix in seconds:
            began = time.perf_counter()
            REDUCTIONS[prefix + kind.removeprefix("arg")](x)
            seconds[prefix] = min(seconds[prefix], time.perf_counter() - began)
    assert seconds["arg"] < 4 * seconds[""]


def test_nan_wins_and_the_first_of_them_is_pointed_at(bench: OpBench) -> None:
    x = torch.randn(4, 65)
    x[0, 40], x[0, 50], x[1, 3], x[1, 64] = torch.nan, torch.nan, torch.inf, torch.nan
    for kind in ("max", "min", "sum", "mean", "norm", "logsumexp"):
        (out,) = bench.run("reduce", {"x": x}, kind=kind)
        assert out.isnan().tolist() == [True, True, False, False]
    for kind in ("argmax", "argmin"):
        (out,) = bench.run("reduce", {"x": x}, kind=kind)
        assert out.tolist()[:2] == [40, 64]


def test_infinities(bench: OpBench) -> None:
    inf = torch.inf
    x = torch.tensor([[inf, 1.0], [-inf, 1.0], [-inf, -inf], [inf, -inf], [1000.0, 1000.0]])
    for kind, wanted in {
        "sum": [inf, -inf, -inf, torch.nan, 2000],
        "max": [inf, 1, -inf, inf, 1000],
        "logsumexp": [inf, 1, -inf, inf, 1000 + np.log(2)],
        "norm": [inf, inf, inf, inf, np.sqrt(2) * 1000],
    }.items():
        (out,) = bench.run("reduce", {"x": x}, kind=kind)
        np.testing.assert_allclose(out, wanted, rtol=1e-6)


@pytest.mark.parametrize(("shape", "axis"), [((3, 0), -1), ((0, 3), 0), ((0,), "all"), ((2, 0, 3), "all")])
def test_of_nothing(bench: OpBench, shape: tuple[int, ...], axis: int | str) -> None:
    for kind, wanted in {"sum": 0.0, "norm": 0.0, "mean": np.nan, "logsumexp": -np.inf}.items():
        (out,) = bench.run("reduce", {"x": torch.empty(shape)}, kind=kind, axis=axis)
        np.testing.assert_array_equal(out, np.full(out.shape, wanted))
        assert out.numel() in (1, 3)
    for kind in EXTREMA:
        with pytest.raises(InvalidRequest, match=r"^x: .* of no element is not defined"):
            bench.run("reduce", {"x": torch.empty(shape)}, kind=kind, axis=axis)


@pytest.mark.parametrize("kind", ORACLES)
def test_no_rows_give_no_results(bench: OpBench, kind: str) -> None:
    (out,) = bench.run("reduce", {"x": torch.empty(0, 5)}, kind=kind)
    assert out.shape == (0,)


@pytest.mark.parametrize("kind", ["sum", "mean", "logsumexp", "norm"])
@pytest.mark.parametrize(("shape", "axis"), [((2**20,), 0), ((2**20, 2), 0), ((2, 2**19), "all")])
def test_a_million_elements_lose_no_digits(kind: str, shape: tuple[int, ...], axis: int | str) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 0.01 + 1
    (out,) = OpBench(2**24).run("reduce", {"x": x}, kind=kind, axis=axis)
    wanted = ORACLES[kind](x.double().numpy(), axis=None if isinstance(axis, str) else axis, keepdims=False)
    np.testing.assert_allclose(out.double(), wanted, rtol=2e-6)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("kind", ORACLES)
def test_rows_share_a_launch(bench: OpBench, kind: str, keepdims: bool) -> None:
    shapes = [((33,), 0), ((4, 33), 1), ((2, 3, 33), -1)]
    bench.check_batch(
        [
            bench.sent("reduce", {"x": torch.randn(shape)}, kind=kind, axis=axis, keepdims=keepdims)
            for shape, axis in shapes
        ]
    )


def test_what_differs_never_shares(bench: OpBench) -> None:
    x = torch.ones(4, 33)
    changes: list[dict[str, object]] = [{}, {"kind": "mean"}, {"keepdims": True}, {"out_dtype": "float16"}]
    keys = [bench.sent("reduce", {"x": x}, **{"kind": "sum", **change}).key for change in changes]
    assert len({*keys, None}) == len(keys) + 1
    for axis in (0, "all"):
        assert bench.sent("reduce", {"x": x}, kind="sum", axis=axis).key is None


@pytest.mark.parametrize(
    ("x", "options", "name"),
    [
        (torch.ones(2), {}, "kind"),
        (torch.ones(2), {"kind": "median"}, "kind"),
        (torch.ones(2), {"kind": "sum", "axis": "rows"}, "axis"),
        (torch.ones(2), {"kind": "sum", "axis": 1}, "axis"),
        (torch.ones(2), {"kind": "argmax", "out_dtype": "float32"}, "out_dtype"),
        (torch.ones(2), {"kind": "sum", "out_dtype": "int64"}, "out_dtype"),
        (torch.tensor(1.0), {"kind": "sum", "axis": "all"}, "x"),
        (torch.ones(2).int(), {"kind": "sum"}, "x"),
    ],
)
def test_bad_requests_name_the_field(bench: OpBench, x: torch.Tensor, options: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}:"):
        bench.run("reduce", {"x": x}, **options)
