"""The k largest and smallest on the CPU backend: two outputs, ties by the smaller index, NaN, odd sizes, batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.op_bench import OpBench
from tilewire.service.errors import InvalidRequest


def oracle(x: torch.Tensor, k: int, axis: int, *, largest: bool) -> tuple[np.ndarray, np.ndarray]:
    """By comparing every pair: NaN above every number, then the value, then the smaller index."""
    rows = np.moveaxis(x.double().numpy(), axis, -1)
    order = np.empty((*rows.shape[:-1], k), np.int64)
    for at in np.ndindex(rows.shape[:-1]):
        sign = -1 if largest else 1
        keys = [
            (sign * int(np.isnan(value)), 0 if np.isnan(value) else sign * value, number)
            for number, value in enumerate(rows[at])
        ]
        order[at] = [number for _, _, number in sorted(keys)[:k]]
    return np.moveaxis(np.take_along_axis(rows, order, -1), -1, axis), np.moveaxis(order, -1, axis)


@pytest.fixture
def bench() -> OpBench:
    return OpBench()


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "axis", "k"),
    [
        ((1,), 0, 1),
        ((5, 33), -1, 33),
        ((5, 33), 0, 3),
        ((3, 7, 2), 1, 4),
        ((2, 1029), 1, 1024),
        ((2, 1100), 1, 1100),
        ((0, 4), 1, 2),
    ],
)
def test_against_pairs(
    bench: OpBench, shape: tuple[int, ...], axis: int, k: int, dtype: torch.dtype, largest: bool
) -> None:
    """Few values, so that ties are many; zeros of both signs, NaN and infinities among them."""
    rng = np.random.default_rng(k)
    values = np.array([0.0, -0.0, 1, -1, 2, np.inf, -np.inf, np.nan, 0.5])
    x = torch.from_numpy(rng.choice(values, shape).astype(np.float32)).to(dtype)
    found, indices = bench.run("topk", {"x": x}, k=k, axis=axis, largest=largest)
    wanted, places = oracle(x, k, axis, largest=largest)
    assert (found.dtype, indices.dtype) == (dtype, torch.int64)
    np.testing.assert_array_equal(indices, places)
    np.testing.assert_array_equal(found.double(), wanted)


def test_rows_share_a_launch_and_both_outputs_are_their_own(bench: OpBench) -> None:
    shapes = [((33,), 0), ((4, 33), 1), ((2, 3, 33), -1)]
    bench.check_batch([bench.sent("topk", {"x": torch.randn(shape)}, k=5, axis=axis) for shape, axis in shapes])
    x = torch.randn(4, 33)
    keys = [
        bench.sent("topk", {"x": x}, k=5).key,
        bench.sent("topk", {"x": x}, k=6).key,
        bench.sent("topk", {"x": x}, k=5, largest=False).key,
        bench.sent("topk", {"x": x.half()}, k=5).key,
        bench.sent("topk", {"x": x[:, 1:].contiguous()}, k=5).key,
    ]
    assert len({*keys, None}) == len(keys) + 1
    assert bench.sent("topk", {"x": x}, k=2, axis=0).key is None


@pytest.mark.parametrize(
    ("x", "options", "name"),
    [
        (torch.ones(4), {}, "k"),
        (torch.ones(4), {"k": 0}, "k"),
        (torch.ones(4), {"k": 5}, "k"),
        (torch.ones(2000), {"k": 2001}, "k"),
        (torch.ones(4), {"k": 1.5}, "k"),
        (torch.ones(4), {"k": 1, "axis": 1}, "axis"),
        (torch.ones(4, 0), {"k": 1}, "k"),
        (torch.tensor(1.0), {"k": 1}, "x"),
        (torch.ones(4).int(), {"k": 1}, "x"),
    ],
)
def test_bad_requests_name_the_field(bench: OpBench, x: torch.Tensor, options: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}:"):
        bench.run("topk", {"x": x}, **options)
