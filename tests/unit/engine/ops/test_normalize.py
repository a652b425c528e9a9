"""Normalisation on the CPU backend against float64: kinds, axes, weights, dtypes, odd sizes, NaN, infinity and nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.op_bench import OpBench
from tilewire.service.errors import InvalidRequest

EPS = {"layer": 1e-5, "rms": 1e-6, "l2": 1e-12}


def oracle(x: torch.Tensor, kind: str, axis: int, eps: float | None = None, /, **vectors: torch.Tensor) -> np.ndarray:
    rows = np.moveaxis(x.double().numpy(), axis, -1)
    eps = EPS[kind] if eps is None else eps
    if kind == "layer":
        rows = rows - rows.mean(-1, keepdims=True)
    if kind == "l2":
        out = rows / np.maximum(np.sqrt((rows**2).sum(-1, keepdims=True)), eps)
    else:
        out = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps)
    out = out * vectors["weight"].double().numpy() if "weight" in vectors else out
    out = out + vectors["bias"].double().numpy() if "bias" in vectors else out
    return np.moveaxis(out, -1, axis)


@pytest.fixture
def bench() -> OpBench:
    return OpBench()


@pytest.mark.parametrize("kind", EPS)
@pytest.mark.parametrize(("shape", "axis"), [((1,), 0), ((5, 33), -1), ((5, 33), 0), ((3, 7, 2), 1), ((2, 129), 1)])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)], ids=str
)
def test_rows_against_float64(
    bench: OpBench, kind: str, shape: tuple[int, ...], axis: int, dtype: torch.dtype, rtol: float
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator).to(dtype)
    vectors = {name: torch.randn(shape[axis], generator=generator) for name in ("weight", "bias")}
    for given in ({}, {"weight": vectors["weight"]}, vectors):
        (out,) = bench.run("normalize", {"x": x, **given}, kind=kind, axis=axis)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.double(), oracle(x, kind, axis, **given), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("kind", EPS)
def test_a_million_elements_lose_no_digits(kind: str) -> None:
    x = torch.rand(2**20, 2, generator=torch.Generator().manual_seed(3)) * 0.01 + 1
    (out,) = OpBench(2**25).run("normalize", {"x": x}, kind=kind, axis=0)
    np.testing.assert_allclose(out.double(), oracle(x, kind, 0), rtol=2e-6, atol=2e-4 if kind == "layer" else 0)


def test_the_result_has_the_dtype_that_is_asked_for_and_eps_counts(bench: OpBench) -> None:
    x = torch.tensor([[3, 4]], dtype=torch.float16)
    (out,) = bench.run("normalize", {"x": x}, kind="l2", out_dtype="float32", eps=10)
    np.testing.assert_allclose(out, [[0.3, 0.4]], rtol=1e-6)
    for kind in ("layer", "rms"):
        (out,) = bench.run("normalize", {"x": x}, kind=kind, out_dtype="float32", eps=0.5)
        np.testing.assert_allclose(out, oracle(x, kind, -1, 0.5), rtol=1e-6)


@pytest.mark.parametrize("kind", EPS)
def test_an_eps_beyond_float32_leaves_nothing(bench: OpBench, kind: str) -> None:
    (out,) = bench.run("normalize", {"x": torch.tensor([[3.0, 4.0]])}, kind=kind, eps=1e308)
    assert not out.any()


def test_equal_elements_and_zeros_are_divided_by_eps_alone(bench: OpBench) -> None:
    (out,) = bench.run("normalize", {"x": torch.full((2, 8), 3.0)}, kind="layer")
    assert not out.any()
    for kind in EPS:
        (out,) = bench.run("normalize", {"x": torch.zeros(2, 8)}, kind=kind)
        assert not out.any()


@pytest.mark.parametrize("kind", EPS)
def test_an_eps_past_float32_is_infinite(bench: OpBench, kind: str) -> None:
    (out,) = bench.run("normalize", {"x": torch.ones(2, 8)}, kind=kind, eps=1e39)
    assert not out.any()


@pytest.mark.parametrize("kind", EPS)
def test_nan_and_infinity_stay_in_their_row(bench: OpBench, kind: str) -> None:
    x = torch.ones(3, 5)
    x[0, 1], x[1, 2] = torch.nan, torch.inf
    (out,) = bench.run("normalize", {"x": x}, kind=kind)
    assert out[0].isnan().all()
    assert out[1, 2].isnan()
    assert out[2].isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
@pytest.mark.parametrize("kind", EPS)
def test_nothing_gives_nothing(bench: OpBench, kind: str, shape: tuple[int, ...]) -> None:
    (out,) = bench.run("normalize", {"x": torch.empty(shape)}, kind=kind)
    assert out.shape == shape


def test_rows_share_a_launch_with_the_same_resident_weight(bench: OpBench) -> None:
    residents = {"weight": torch.randn(33), "bias": torch.randn(33)}
    shapes = [((33,), 0), ((4, 33), 1), ((2, 3, 33), -1)]
    bench.check_batch(
        [
            bench.sent("normalize", {"x": torch.randn(shape)}, residents, kind="layer", axis=axis)
            for shape, axis in shapes
        ]
    )
    bench.check_batch([bench.sent("normalize", {"x": torch.randn(shape)}, kind="rms") for shape, _ in shapes])
    x = torch.randn(4, 33)
    keys = [
        bench.sent("normalize", {"x": x}, residents, kind="layer").key,
        bench.sent("normalize", {"x": x}, {"weight": residents["weight"]}, kind="layer").key,
        bench.sent("normalize", {"x": x}, {"weight": residents["bias"]}, kind="layer").key,
        bench.sent("normalize", {"x": x}, kind="layer").key,
        bench.sent("normalize", {"x": x}, kind="layer", eps=1).key,
        bench.sent("normalize", {"x": x}, kind="rms").key,
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert bench.sent("normalize", {"x": x, "weight": residents["weight"]}, kind="layer").key is None
    assert bench.sent("normalize", {"x": x}, kind="layer", axis=0).key is None


@pytest.mark.parametrize(
    ("inputs", "options", "name"),
    [
        ({"x": torch.ones(2)}, {}, "kind"),
        ({"x": torch.ones(2)}, {"kind": "batch"}, "kind"),
        ({"x": torch.ones(2)}, {"kind": "rms", "axis": 1}, "axis"),
        ({"x": torch.ones(2)}, {"kind": "rms", "eps": -1}, "eps"),
        ({"x": torch.ones(2)}, {"kind": "rms", "eps": "inf"}, "eps"),
        ({"x": torch.ones(2)}, {"kind": "rms", "out_dtype": "int32"}, "out_dtype"),
        ({"x": torch.ones(2).int()}, {"kind": "rms"}, "x"),
        ({"x": torch.ones(2), "weight": torch.ones(3)}, {"kind": "rms"}, "weight"),
        ({"x": torch.ones(2), "bias": torch.ones(2).double()}, {"kind": "rms"}, "bias"),
        ({"x": torch.tensor(1.0)}, {"kind": "rms"}, "x"),
    ],
)
def test_bad_requests_name_the_field(
    bench: OpBench, inputs: dict[str, torch.Tensor], options: dict[str, object], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}:"):
        bench.run("normalize", inputs, **options)
