"""Exact search on the CPU backend: metrics against float64, exact ties, NaN, excluded items, int8, norms of residents."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.op_bench import OpBench
from tests.support.peak import begin_peak, peak_bytes
from tilewire.service.engine.ops.op import Operands
from tilewire.service.engine.ops.search import MAX_SCORES, MIN_QUERIES, EngineSearch
from tilewire.service.errors import BeyondLimit, InvalidRequest
from tilewire.service.ops.search import Metric, SearchOptions

METRICS: tuple[Metric, ...] = ("dot", "cosine", "l2")


def scores_of(a: torch.Tensor, b: torch.Tensor, metric: str) -> np.ndarray:
    x, y = a.double().numpy(), b.double().numpy()
    dots: np.ndarray = x @ y.T
    if metric == "dot":
        return dots
    if metric == "l2":
        distances: np.ndarray = ((x[..., None, :] - y) ** 2).sum(-1)
        return distances
    lengths = np.sqrt((x**2).sum(-1))[..., None] * np.sqrt((y**2).sum(-1))
    cosines: np.ndarray = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths != 0)
    return cosines


@pytest.fixture
def bench() -> OpBench:
    return OpBench()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "items", "k"), [((1, 7), 1, 1), ((5, 33), 100, 10), ((2, 3, 16), 65, 65)])
def test_scores_are_near_float64_and_in_order(
    bench: OpBench, metric: str, dtype: torch.dtype, queries: tuple[int, ...], items: int, k: int
) -> None:
    generator = torch.Generator().manual_seed(items)
    a = torch.randn(queries, generator=generator).to(dtype)
    b = torch.randn((items, queries[-1]), generator=generator).to(dtype)
    values, indices = bench.run("search", {"a": a, "b": b}, k=k, metric=metric)
    assert (values.dtype, indices.dtype) == (torch.float32, torch.int64)
    assert values.shape == indices.shape == (*queries[:-1], k)
    scores = scores_of(a, b, metric)
    sign = 1 if metric == "l2" else -1
    best = np.sort(sign * scores, axis=-1)[..., :k] * sign
    np.testing.assert_allclose(values, best, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(scores, indices.numpy(), -1), values, rtol=1e-5, atol=1e-4)
    assert all(len(set(row)) == k for row in indices.reshape(-1, k).tolist())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_of_equal_items_the_first_is_found_wherever_they_lie(bench: OpBench, metric: str, dtype: torch.dtype) -> None:
    """The last bits of a float32 product depend on its column."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        count = int(torch.randint(3, 600, (1,), generator=generator))
        b = torch.randn((count, 33), generator=generator).to(dtype)
        b[count // 2] = b[-1] = b[0]
        rows = 1 + 4 * (seed % 2)
        a = (b[:1] if metric == "l2" else b[:1] * 2).expand(rows, 33).contiguous()
        values, indices = bench.run("search", {"a": a, "b": b}, k=3, metric=metric)
        bench.end = 0
        assert indices.tolist() == [[0, count // 2, count - 1]] * rows
        assert values.unique().numel() == 1


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_equal_scores_are_in_the_order_of_their_items(bench: OpBench, metric: str, dtype: torch.dtype) -> None:
    """Small whole numbers and powers of two, so that every score is exact and ties are many."""
    rng = np.random.default_rng(1)
    a, b = (torch.from_numpy(rng.integers(-1, 2, shape)).to(dtype) for shape in ((6, 4), (200, 4)))
    b = b * 2 if metric == "cosine" else b
    values, indices = bench.run("search", {"a": a, "b": b}, k=150, metric=metric)
    scores = torch.from_numpy(scores_of(a, b, metric)).float()
    order = np.argsort((scores if metric == "l2" else -scores).numpy(), axis=-1, kind="stable")[:, :150]
    if metric == "cosine":
        np.testing.assert_allclose(values, np.take_along_axis(scores.numpy(), order, -1), rtol=1e-6)
    else:
        np.testing.assert_array_equal(indices, order)
        np.testing.assert_array_equal(values, np.take_along_axis(scores.numpy(), order, -1))
    ties = values[:, 1:] == values[:, :-1]
    assert ties.any()
    assert (indices[:, 1:] > indices[:, :-1])[ties].all()


def test_int8_sums_are_exact(bench: OpBench) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((3, 1001), (50, 1001)))
    for metric in ("dot", "l2"):
        values, indices = bench.run("search", {"a": torch.from_numpy(a), "b": torch.from_numpy(b)}, k=50, metric=metric)
        wide = (a.astype(np.int64), b.astype(np.int64))
        exact = wide[0] @ wide[1].T if metric == "dot" else ((wide[0][:, None] - wide[1]) ** 2).sum(-1)
        found = np.take_along_axis(exact, indices.numpy(), -1)
        np.testing.assert_allclose(values, found, rtol=3e-7)


def test_nan_comes_after_every_number_and_zero_vectors_have_cosine_zero(bench: OpBench) -> None:
    b = torch.tensor([[torch.nan, 0], [-torch.inf, 0], [0, 0], [1, 0], [torch.nan, 1]])
    a = torch.tensor([[1.0, 1.0]])
    values, indices = bench.run("search", {"a": a, "b": b}, k=5)
    assert indices.tolist() == [[3, 2, 1, 0, 4]]
    np.testing.assert_array_equal(values, [[1, 0, -np.inf, np.nan, np.nan]])
    _, indices = bench.run("search", {"a": a, "b": b}, k=5, metric="l2")
    assert indices.tolist()[0][:2] == [3, 2]
    assert set(indices.tolist()[0][3:]) == {0, 4} or indices.tolist()[0][-1] == 4
    values, indices = bench.run("search", {"a": torch.zeros(1, 2), "b": b[2:4]}, k=2, metric="cosine")
    assert (values.tolist(), indices.tolist()) == ([[0, 0]], [[0, 1]])


def test_orthogonal_integers_have_cosine_zero_wherever_they_lie(bench: OpBench) -> None:
    # Divided by the length of the query first, their sum is no more 0, and depends on the order of its terms.
    a = torch.tensor([[6.0, 1, 5, 0], [5, 4, 1, 0], [6, 2, 3, 1], [7, 3, 3, 1]])
    b = torch.tensor([[1.0, -1, -1, -1]]).repeat(301, 1)
    values, indices = bench.run("search", {"a": a, "b": b}, k=301, metric="cosine")
    assert not values.any()
    assert torch.equal(indices, torch.arange(301).expand(4, -1))


def test_a_squared_distance_is_never_negative(bench: OpBench) -> None:
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 1000
    values, _ = bench.run("search", {"a": x, "b": x}, k=5, metric="l2")
    assert (values >= 0).all()


@pytest.mark.parametrize("k", [3, 1024])
def test_distances_keep_their_digits_where_norms_are_large(bench: OpBench, k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn((7, 64), generator=generator)
    b = torch.cat(
        [a, a + 0.1 * torch.randn((7, 64), generator=generator), torch.randn((2000, 64), generator=generator)]
    )
    a, b = a + 100, b + 100
    values, indices = bench.run("search", {"a": a, "b": b}, k=k, metric="l2")
    assert indices[:, :2].tolist() == [[row, row + 7] for row in range(7)]
    assert not values[:, 0].any()
    np.testing.assert_allclose(values, np.take_along_axis(scores_of(a, b, "l2"), indices.numpy(), -1), rtol=1e-6)


@pytest.mark.parametrize(("width", "offset", "spread"), [(3, 1e5, 1), (2, 50, 0.5), (64, 1000, 1), (16, 1e20, 1e18)])
def test_the_nearest_are_found_far_from_the_origin(bench: OpBench, width: int, offset: float, spread: float) -> None:
    """Norms and products of such points agree in more digits than float32 has."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn((rows, width), generator=generator) * spread + offset for rows in (5, 10_000))
    values, indices = bench.run("search", {"a": a, "b": b}, k=5, metric="l2")
    scores = scores_of(a, b, "l2")
    np.testing.assert_array_equal(indices, np.argsort(scores, -1, kind="stable")[:, :5])
    np.testing.assert_allclose(values, np.take_along_axis(scores, indices.numpy(), -1).astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("distance", [1e12, 1e30])
def test_the_nearest_are_found_where_items_lie_far_from_each_other(
    bench: OpBench, k: int, has_bias: bool, distance: float
) -> None:
    """Wherever the centre is, most of the digits of their norms are lost in it."""
    generator = torch.Generator().manual_seed(k)
    near = torch.randn((400, 4), generator=generator)
    far = torch.cat([torch.full((1, 4), distance), distance * torch.randn((200, 4), generator=generator)])
    a = near[:7] + 0.01 * torch.randn((7, 4), generator=generator)
    bias = torch.randn(601, generator=generator) if has_bias else torch.zeros(601)
    # One far point moves the centre already, and with many there is none that suits.
    for count in (401, 601):
        inputs = {"a": a, "b": torch.cat([near, far])[:count], "bias": bias[:count]}
        values, indices = bench.run("search", inputs, k=k, metric="l2")
        scores = scores_of(a, inputs["b"], "l2") + inputs["bias"].numpy()
        np.testing.assert_array_equal(indices, np.argsort(scores, axis=-1, kind="stable")[:, :k])
        np.testing.assert_allclose(values, np.take_along_axis(scores, indices.numpy(), -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 4, 33, 700])
def test_distances_have_the_same_bits_beside_an_item_far_away(bench: OpBench, width: int) -> None:
    """As another part of sharded items has them: equal ones rank by their index."""
    items = torch.randn((300, width), generator=torch.Generator().manual_seed(width))
    a = items[:5] + 0.1
    values, indices = bench.run("search", {"a": a, "b": items}, k=9, metric="l2")
    far = torch.cat([items, torch.full((1, width), 1e15)])
    values_beside, indices_beside = bench.run("search", {"a": a, "b": far}, k=9, metric="l2")
    assert torch.equal(indices, indices_beside)
    assert torch.equal(values, values_beside)


def test_an_infinite_distance_is_a_number(bench: OpBench) -> None:
    b = torch.tensor([[torch.nan, 0], [0, torch.inf], [1e30, 0], [1, 1]])
    values, indices = bench.run("search", {"a": torch.tensor([[1.0, 1.0]]), "b": b}, k=4, metric="l2")
    assert indices.tolist() == [[3, 1, 2, 0]]
    np.testing.assert_array_equal(values, [[0, np.inf, np.inf, np.nan]])


@pytest.mark.parametrize("metric", METRICS)
def test_a_bias_is_added_and_excludes_items(bench: OpBench, metric: str) -> None:
    a, b = torch.randn(3, 8), torch.randn(20, 8)
    bias = torch.zeros(20)
    bias[::2] = torch.inf if metric == "l2" else -torch.inf
    bias[1] = -1000 if metric == "l2" else 1000
    values, indices = bench.run("search", {"a": a, "b": b, "bias": bias}, k=10, metric=metric)
    assert (indices % 2 == 1).all()
    assert (indices[:, 0] == 1).all()
    assert values.isfinite().all()


@pytest.mark.parametrize("metric", METRICS)
def test_excluded_items_follow_where_fewer_than_k_are_left(bench: OpBench, metric: str) -> None:
    excluded = torch.inf if metric == "l2" else -torch.inf
    bias = torch.full((9,), excluded)
    bias[[4, 7]] = 0
    a, b = torch.randn(3, 8), torch.randn(9, 8)
    # One that is excluded and NaN is no number.
    b[0] = torch.nan
    values, indices = bench.run("search", {"a": a, "b": b, "bias": bias}, k=9, metric=metric)
    assert (indices[:, :2].sort().values == torch.tensor([4, 7])).all()
    assert values[:, :2].isfinite().all()
    assert indices[:, 2:].tolist() == [[1, 2, 3, 5, 6, 8, 0]] * 3
    np.testing.assert_array_equal(values[:, 2:], [[excluded] * 6 + [np.nan]] * 3)


def test_no_queries_and_no_elements(bench: OpBench) -> None:
    values, indices = bench.run("search", {"a": torch.empty(0, 4), "b": torch.ones(3, 4)}, k=2)
    assert values.shape == indices.shape == (0, 2)
    for metric in METRICS:
        values, indices = bench.run("search", {"a": torch.empty(2, 0), "b": torch.empty(3, 0)}, k=3, metric=metric)
        assert indices.tolist() == [[0, 1, 2]] * 2
        assert not values.any()


@pytest.mark.parametrize("metric", METRICS)
def test_many_queries_find_what_each_finds_alone(metric: str) -> None:
    """The scores of 8 Mi pairs are computed for some queries at a time."""
    bench, generator = OpBench(2**23), torch.Generator().manual_seed(3)
    b, bias = torch.randn((2**13, 3), generator=generator), torch.randn(2**13, generator=generator)
    a = torch.randn((2, 2**9, 3), generator=generator)
    values, indices = bench.run("search", {"a": a, "b": b, "bias": bias}, k=3, metric=metric)
    for place in ((0, 0), (0, 2**8 - 1), (0, 2**8), (1, 0), (1, 2**9 - 1)):
        alone = bench.run("search", {"a": a[place][None], "b": b, "bias": bias}, k=3, metric=metric)
        assert torch.equal(alone[1][0], indices[place])
        torch.testing.assert_close(alone[0][0], values[place], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [3, 1000])
@pytest.mark.parametrize("metric", METRICS)
def test_of_many_items_some_are_scored_at_a_time(metric: Metric, k: int) -> None:
    """Equal scores, NaN and excluded items among all of them are in the same order."""
    rows, count = MIN_QUERIES + 1, 2 * MAX_SCORES // MIN_QUERIES + 5
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randint(-3, 4, (size, 2), generator=generator).float() for size in (rows, count))
    b[7::1000, 0] = torch.nan
    bias = torch.zeros(count)
    bias[torch.rand(count, generator=generator) < 0.3] = torch.inf if metric == "l2" else -torch.inf
    inputs = Operands({"a": a, "bias": bias}, {"b": b})
    _, indices = EngineSearch().cpu(inputs, SearchOptions(k=k, metric=metric), ())
    for row in (0, 1, MIN_QUERIES - 1, MIN_QUERIES):
        alone = Operands({"a": a[row : row + 1], "bias": bias}, {"b": b})
        assert torch.equal(EngineSearch().cpu(alone, SearchOptions(k=k, metric=metric), ())[1][0], indices[row])
        scores = (1 if metric == "l2" else -1) * (scores_of(a[row : row + 1], b, metric)[0] + bias.numpy())
        order = np.argsort(np.where(np.isnan(scores), np.inf, scores).astype(np.float32), kind="stable")
        assert np.array_equal(order[:k], indices[row].numpy())


@pytest.mark.alone
def test_many_queries_share_the_conversion_of_the_items() -> None:
    """16 times as many take 4 times as long."""
    a, b = (torch.rand((size, 32), generator=torch.Generator().manual_seed(6)) for size in (MIN_QUERIES, 2**20))
    seconds = dict.fromkeys((MIN_QUERIES // 16, MIN_QUERIES), math.inf)
    for _ in range(4):
        for count in seconds:
            began = time.perf_counter()
            EngineSearch().cpu(Operands({"a": a[:count]}, {"b": b}), SearchOptions(k=10), ())
            seconds[count] = min(seconds[count], time.perf_counter() - began)
    assert seconds[MIN_QUERIES] < 10 * seconds[MIN_QUERIES // 16]


@pytest.mark.parametrize("metric", METRICS)
def test_memory_for_scores_does_not_grow_with_the_queries(metric: Metric) -> None:
    a, b = torch.rand(2**11, 2), torch.rand(2**14, 2)
    before = begin_peak()
    EngineSearch().cpu(Operands({"a": a, "b": b}, {}), SearchOptions(k=1, metric=metric), ())
    # All scores at once are 256 MiB in float64 and 256 MiB of their order. Those of some queries are 16 MiB in float32.
    assert peak_bytes() - before < 2**26


def test_queries_without_elements_cost_no_scores() -> None:
    bench = OpBench(2**25)
    a, b, bias = torch.empty(2**20, 0), torch.empty(2**20, 0), torch.arange(2.0**20)
    values, indices = bench.run("search", {"a": a, "b": b, "bias": bias}, k=1)
    assert torch.equal(indices, torch.full((2**20, 1), 2**20 - 1))
    assert torch.equal(values, torch.full((2**20, 1), 2.0**20 - 1))


@pytest.mark.parametrize("metric", METRICS)
def test_queries_share_a_launch_against_the_same_resident_items(bench: OpBench, metric: str) -> None:
    residents = {"b": torch.randn(50, 16), "bias": torch.randn(50)}
    shapes = [(1, 16), (4, 16), (2, 3, 16)]
    jobs = [bench.sent("search", {"a": torch.randn(shape)}, residents, k=5, metric=metric) for shape in shapes]
    bench.check_batch(jobs)
    a = torch.randn(2, 16)
    keys = [
        jobs[0].key,
        bench.sent("search", {"a": a}, {"b": residents["b"]}, k=5, metric=metric).key,
        bench.sent("search", {"a": a}, {"b": residents["b"].clone()}, k=5, metric=metric).key,
        bench.sent("search", {"a": a}, residents, k=6, metric=metric).key,
    ]
    assert len({*keys, None}) == len(keys) + 1
    assert bench.sent("search", {"a": a, "b": residents["b"]}, k=5, metric=metric).key is None


def near(items: torch.Tensor) -> torch.Tensor:
    return items * 1e-6 + torch.linspace(1, 2, items.shape[1])


def in_two_clusters(items: torch.Tensor) -> torch.Tensor:
    return torch.cat([items[::2] + 1e3, items[1::2] - 1e3])


def beside_a_long_one(items: torch.Tensor) -> torch.Tensor:
    return torch.cat([items[:-1], 1e15 * items[-1:]])


def of_any_length(items: torch.Tensor) -> torch.Tensor:
    return items * torch.logspace(-20, 18, len(items)).unsqueeze(-1)


def with_an_infinity(items: torch.Tensor) -> torch.Tensor:
    return torch.cat([items[:-1], torch.full_like(items[-1:], torch.inf)])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "change",
    [
        torch.clone,
        near,
        in_two_clusters,
        beside_a_long_one,
        of_any_length,
        with_an_infinity,
        lambda items: items * 1e-43,
        lambda items: items * 1e30,
        lambda items: (2 * items).round(),
        lambda items: items[torch.arange(len(items)) % 40],
    ],
)
def test_the_best_of_many_are_those_of_float64(
    bench: OpBench, change: Callable[[torch.Tensor], torch.Tensor], metric: str, has_bias: bool
) -> None:
    """Float32 chooses candidates among so many, where it can."""
    check_best_of(bench, change, metric, torch.float32, 4000, has_bias=has_bias)


@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        torch.clone,
        near,
        lambda items: items * 1e-2 + torch.linspace(1, 2, items.shape[1]),
        beside_a_long_one,
        with_an_infinity,
        lambda items: items * 1e-6,
        lambda items: items[:40].repeat(450, 1),
    ],
)
def test_the_best_of_very_many_of_16_bits_are_those_of_float64(
    bench: OpBench, change: Callable[[torch.Tensor], torch.Tensor], metric: str, dtype: torch.dtype, has_bias: bool
) -> None:
    """Products of 16 bits choose candidates among so many, where they can."""
    check_best_of(bench, change, metric, dtype, 18_000, has_bias=has_bias)


def check_best_of(
    bench: OpBench,
    change: Callable[[torch.Tensor], torch.Tensor],
    metric: str,
    dtype: torch.dtype,
    count: int,
    *,
    has_bias: bool,
) -> None:
    generator = torch.Generator().manual_seed(8)
    items = torch.randn((count, 12), generator=generator)
    b = change(items).to(dtype)
    a = change(items * (1 + 1e-3 * torch.randn(items.shape, generator=generator)))[:40].to(dtype)
    scores = torch.from_numpy(scores_of(a, b, metric)).float().numpy()
    given = {"a": a, "b": b}
    if has_bias:
        given["bias"] = torch.randn(count, generator=generator)
        scores = scores + given["bias"].numpy()
    order = np.argsort(scores if metric == "l2" else -scores, axis=-1, kind="stable")[:, :2]
    values, indices = bench.run("search", given, k=2, metric=metric)
    chosen, expected = (np.take_along_axis(scores, one, -1) for one in (indices.numpy(), order))
    # Differences are rounded to float32.
    is_rounded = metric == "l2"
    np.testing.assert_allclose(chosen, expected, rtol=1e-5 if is_rounded else 0, atol=1e-38 if is_rounded else 0)
    np.testing.assert_allclose(values, chosen, rtol=1e-5 if is_rounded else 2e-7, atol=1e-38)
    if metric != "l2":
        np.testing.assert_array_equal(indices, order)


@pytest.mark.parametrize(("metric", "kind"), [("cosine", "cosine"), ("l2", "squares")])
def test_norms_of_a_resident_are_computed_once_and_go_with_it(metric: str, kind: str) -> None:
    op = EngineSearch()
    a, b = torch.randn(2, 8), torch.randn(9, 8)
    options = SearchOptions(k=3, metric=metric)  # type: ignore[arg-type]
    kept = op._norms[kind]
    first = op.cpu(Operands({"a": a}, {"b": b}), options, ())
    norms = kept[b]
    again = op.cpu(Operands({"a": a}, {"b": b}), options, ())
    assert kept[b] is norms
    # Memory of a launch is used again with other numbers.
    own = b.clone()
    alone = op.cpu(Operands({"a": a, "b": own}, {}), options, ())
    assert len(kept) == 1
    for one, two, three in zip(first, again, alone, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    del b
    gc.collect()
    assert len(kept) == 0


@pytest.mark.parametrize(
    ("inputs", "options", "name"),
    [
        ({"a": torch.ones(2, 4), "b": torch.ones(3, 4)}, {}, "k"),
        ({"a": torch.ones(2, 4), "b": torch.ones(3, 4)}, {"k": 0}, "k"),
        ({"a": torch.ones(2, 4), "b": torch.ones(2000, 4)}, {"k": 1025}, "k"),
        ({"a": torch.ones(4), "b": torch.ones(3, 4)}, {"k": 1}, "a"),
        ({"a": torch.ones(2, 4), "b": torch.ones(4)}, {"k": 1}, "b"),
        ({"a": torch.ones(2, 4), "b": torch.ones(3, 5)}, {"k": 1}, "b"),
        ({"a": torch.ones(2, 4), "b": torch.ones(3, 4).half()}, {"k": 1}, "b"),
        ({"a": torch.ones(2, 4), "b": torch.ones(3, 4)}, {"k": 1, "metric": "l1"}, "metric"),
        ({"a": torch.ones(2, 4).half(), "b": torch.ones(3, 4).half()}, {"k": 1, "precision": "tf32"}, "precision"),
        ({"a": torch.ones(2, 4), "b": torch.ones(3, 4), "bias": torch.ones(4)}, {"k": 1}, "bias"),
        ({"a": torch.ones(2, 4), "b": torch.ones(3, 4), "bias": torch.ones(3).int()}, {"k": 1}, "bias"),
        ({"a": torch.ones(2, 4)}, {"k": 1}, "b"),
    ],
)
def test_bad_requests_name_the_field(
    bench: OpBench, inputs: dict[str, torch.Tensor], options: dict[str, object], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}:"):
        bench.run("search", inputs, **options)


def test_int8_items_that_could_overflow_are_refused(bench: OpBench) -> None:
    wide = torch.zeros((1, 131_072), dtype=torch.int8)
    with pytest.raises(BeyondLimit, match=r"^a:"):
        bench.run("search", {"a": wide, "b": wide}, k=1)


def test_the_nearest_among_near_duplicates(bench: OpBench) -> None:
    generator = torch.Generator().manual_seed(0)
    query = 1 + torch.rand(1, 512, generator=generator)
    items = query.repeat(1000, 1)
    # All but the last differ from the query by a unit in the last place of one element.
    places = torch.randint(0, 512, (999,), generator=generator)
    items[torch.arange(999), places] = torch.nextafter(items[torch.arange(999), places], torch.tensor(9.0))
    values, indices = bench.run("search", {"a": query, "b": items}, k=1, metric="l2")
    assert (values.tolist(), indices.tolist()) == ([[0.0]], [[999]])


@pytest.mark.parametrize("count", [20, 40])
def test_the_distance_of_equal_infinities_comes_last(bench: OpBench, count: int) -> None:
    items = torch.tensor([[torch.inf]] * count + [[-torch.inf], [0.0]])
    for sign in (1, -1):
        values, indices = bench.run(
            "search", {"a": sign * torch.tensor([[torch.inf]]), "b": sign * items}, k=3, metric="l2"
        )
        assert (values[0, :2].tolist(), indices[0].tolist()) == ([torch.inf] * 2, [count, count + 1, 0])
        assert values[0, 2].isnan()


@pytest.mark.parametrize("length", [1e-22, 1e-30, 1e20, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cosine_of_very_short_and_long_vectors(bench: OpBench, dtype: torch.dtype, length: float) -> None:
    a, b = torch.tensor([[length, 0.0]]).to(dtype), torch.tensor([[0.0, length], [length, 0.0], [1.0, 1.0]]).to(dtype)
    values, indices = bench.run("search", {"a": a, "b": b}, k=3, metric="cosine")
    assert indices.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(values, [[1, 0.5**0.5, 0]], rtol=1e-6)


def test_distances_of_integers_are_exact(bench: OpBench) -> None:
    items = torch.randint(-128, 128, (200, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    values, indices = bench.run("search", {"a": items[:5], "b": torch.cat([items, items])}, k=400, metric="l2")
    exact = ((items[:5, None].double() - torch.cat([items, items]).double()) ** 2).sum(-1)
    order = exact.sort(dim=-1, stable=True).indices
    assert indices.tolist() == order.tolist()
    assert values.double().tolist() == exact.gather(-1, order).tolist()
