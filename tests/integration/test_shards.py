"""Residents in parts on several devices: their products and searches, their replacement under load, the death of an engine."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import ml_dtypes
import numpy as np
import pytest

from tests.support.exposition import settles, total
from tests.support.live_server import LiveServer, serving
from tests.support.problems import check_problem
from tests.support.tensor_bodies import TYPES, Array, from_safetensors, to_npy, to_safetensors
from tilewire.service.ipc.board import home_of
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import part_of

TIMEOUT_S = 30.0
QUOTA = 64 * 1024
FLAGS = ("--arena-bytes", "64MiB", "--no-spare-engine", "--resident-bytes", "64KiB")
RNG = np.random.default_rng(7)


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.slow)], ids=["two", "three"], scope="module")
def count(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def server(count: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--device", f"cpu:{','.join(map(str, range(count)))}", "--gateways", "2", *FLAGS)
    with serving(tmp_path_factory.mktemp("shards") / "log", *flags) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
        for one in client.get("/v1/tensors").json():
            client.delete(f"/v1/tensors/{one['name']}")
        assert settles(client, lambda now: total(now, "tilewire_resident_tensors") == 0)


def integers(*shape: int, dtype: str = "float32") -> Array:
    """Small integers: their sums are exact in every dtype."""
    values: Array = RNG.integers(-3, 4, shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    return values


def put(client: httpx.Client, name: str, array: Array, query: str = "placement=shard") -> None:
    response = client.put(f"/v1/tensors/{name}?{query}", content=to_safetensors({"x": array}))
    assert response.status_code in (200, 201), response.text


def post(client: httpx.Client, path: str, **tensors: Array) -> dict[str, Array]:
    response = client.post(path, content=to_safetensors(tensors), headers={"accept": TYPES["safetensors"]})
    assert response.status_code == 200, response.text
    return from_safetensors(response.content)


def multiply(client: httpx.Client, path: str, **tensors: Array) -> Array:
    (out,) = post(client, path, **tensors).values()
    return out


def fetch(client: httpx.Client, name: str) -> Array:
    got = client.get(f"/v1/tensors/{name}", headers={"accept": TYPES["safetensors"]})
    assert got.status_code == 200, got.text
    (array,) = from_safetensors(got.content).values()
    return array


def kill(server: LiveServer, client: httpx.Client, count: int) -> int:
    """Kills an engine; returns its index as soon as the gateway has seen it go."""
    os.kill(min(server.engines()), signal.SIGKILL)
    end_s = time.monotonic() + TIMEOUT_S
    while len(ready := ready_devices(client)) == count:
        assert time.monotonic() < end_s, ready
    return next(index for index in range(count) if f"cpu:{index}" not in ready)


def ready_devices(client: httpx.Client) -> set[str]:
    return {engine["device"] for engine in client.get("/v2").json()["engines"]}


@pytest.mark.parametrize("width", [2048 + 37, 37, 3])
def test_products_in_parts_are_whole(client: httpx.Client, width: int) -> None:
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        b, a = integers(4, width, dtype=dtype), integers(2, 3, 4, dtype=dtype)
        expected = a.astype(np.float32) @ b.astype(np.float32)
        put(client, "w", b)
        np.testing.assert_array_equal(multiply(client, "/v1/matmul?b=@w", a=a).astype(np.float32), expected)
        np.testing.assert_array_equal(fetch(client, "w").astype(np.float32), b.astype(np.float32))
        # The same columns as rows, and a transposed, too.
        put(client, "turned", np.ascontiguousarray(b.T), "placement=shard&axis=-2")
        got = multiply(client, "/v1/matmul?b=@turned&transpose_b=true&transpose_a=true", a=np.ascontiguousarray(a[0].T))
        np.testing.assert_array_equal(got.astype(np.float32), expected[0])
        np.testing.assert_array_equal(fetch(client, "turned").astype(np.float32), b.T.astype(np.float32))
    bias = integers(width)
    put(client, "w", b.astype(np.float32))
    expected = np.maximum(a[0].astype(np.float32) @ b.astype(np.float32) + bias, 0)
    query = "/v1/matmul?b=@w&activation=relu"
    np.testing.assert_array_equal(multiply(client, query, a=a[0].astype(np.float32), bias=bias), expected)
    for placement in ("shard", "replicate", "single"):
        put(client, "bias", bias, f"placement={placement}")
        got = multiply(client, f"{query}&bias=@bias", a=a[0].astype(np.float32))
        np.testing.assert_array_equal(got, expected)
    # Operands that are resident, too, wherever they lie.
    for placement in ("replicate", "single"):
        put(client, "a", a[0].astype(np.float32), f"placement={placement}")
        assert client.post(f"{query}&bias=@bias&a=@a").status_code == 200
    put(client, "batched", np.stack([b, b + 1]).astype(np.float32))
    got = multiply(client, "/v1/matmul?b=@batched", a=a.astype(np.float32))
    np.testing.assert_array_equal(got, a.astype(np.float32) @ np.stack([b, b + 1]).astype(np.float32))
    np.testing.assert_array_equal(fetch(client, "batched"), np.stack([b, b + 1]).astype(np.float32))


def test_float8_scales_go_with_their_columns(client: httpx.Client) -> None:
    b, a = integers(16, 37, dtype="float8_e4m3fn"), integers(4, 16, dtype="float8_e4m3fn")
    put(client, "w", b)
    b_scale, a_scale = RNG.random((1, 37), dtype=np.float32) + 1, RNG.random((4,), dtype=np.float32) + 1
    got = multiply(client, "/v1/matmul?b=@w&out_dtype=float32", a=a, a_scale=a_scale, b_scale=b_scale)
    expected = (a.astype(np.float32) @ b.astype(np.float32)) * a_scale[:, None] * b_scale
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    one = np.full((1,), 2, np.float32)
    got = multiply(client, "/v1/matmul?b=@w&out_dtype=float32", a=a, a_scale=one, b_scale=one)
    np.testing.assert_array_equal(got, 4 * (a.astype(np.float32) @ b.astype(np.float32)))


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_searches_in_parts_find_what_one_engine_finds(client: httpx.Client, metric: str) -> None:
    # Few values: most scores are equal to others, in other parts, too.
    items, queries = integers(301, 4), integers(9, 4)
    items[5] = items[200] = np.nan
    bias = RNG.choice([0, 1, -np.inf, np.inf], 301).astype(np.float32)
    put(client, "items", items, "placement=shard&axis=-2")
    put(client, "whole", items, "placement=replicate")
    for k in (1, 10, 250, 301):
        for given in ({"a": queries}, {"a": queries, "bias": bias}):
            path = f"/v1/search?metric={metric}&k={k}"
            got, expected = (post(client, f"{path}&b=@{name}", **given) for name in ("items", "whole"))
            np.testing.assert_array_equal(got["indices"], expected["indices"])
            np.testing.assert_array_equal(got["values"], expected["values"])


def test_the_largest_elements_of_parts_are_those_of_the_whole(client: httpx.Client) -> None:
    x = integers(6, 101)
    x[0, 3] = x[0, 90] = x[2, 50] = np.nan
    x[1, 7] = np.inf
    put(client, "x", x)
    put(client, "whole", x, "placement=replicate")
    for k, largest in itertools.product((1, 40, 101), ("true", "false")):
        got, expected = (post(client, f"/v1/topk?x=@{name}&k={k}&largest={largest}") for name in ("x", "whole"))
        np.testing.assert_array_equal(got["indices"], expected["indices"])
        np.testing.assert_array_equal(got["values"], expected["values"])
    put(client, "line", x[1])
    assert int(post(client, "/v1/topk?x=@line&k=1")["indices"][0]) == 7


def test_what_needs_the_whole_says_so(client: httpx.Client, count: int) -> None:
    b = integers(8, 12)
    put(client, "w", b)
    put(client, "rows", b, "placement=shard&axis=-2")
    a = to_safetensors({"a": integers(2, 8)})
    check_problem(client.post("/v1/softmax?x=@w"), 400, "x: 'w' is sharded")
    check_problem(client.post("/v1/matmul?b=@rows", content=a), 400, "axis=-1")
    check_problem(client.post("/v1/search?k=2&b=@w", content=to_safetensors({"a": integers(2, 12)})), 400, "axis=-2")
    check_problem(client.post("/v1/matmul?a=@w&b=@rows&transpose_a=true"), 400, "a: 'w'")
    check_problem(client.post("/v1/topk?x=@rows&k=2"), 400, "x: 'rows'")
    put(client, "bias", integers(12))
    body = to_safetensors({"a": integers(2, 8), "b": b})
    check_problem(client.post("/v1/matmul?bias=@bias", content=body), 400, "bias: 'bias' is sharded, but b is not")
    program = {
        "inputs": {"x": {"dtype": "float32", "shape": [-1, 8]}},
        "steps": [{"op": "matmul", "inputs": {"a": "x", "b": "@w"}, "as": "y"}],
        "outputs": ["y"],
    }
    check_problem(client.put("/v1/programs/p", json=program), 400, "step 1: b: 'w' is sharded")
    put(client, "w", b, "placement=replicate")
    assert client.put("/v1/programs/p", json=program).status_code == 201
    x = to_safetensors({"x": integers(2, 8)})
    assert client.post("/v1/programs/p", content=x).status_code == 200
    put(client, "w", b)
    check_problem(client.post("/v1/programs/p", content=x), 400, "step 1: b: 'w' is sharded")
    assert client.delete("/v1/programs/p").status_code == 204
    check_problem(client.put("/v1/tensors/x?placement=shard&axis=1", content=to_npy(b)), 400, "axis")
    check_problem(client.put("/v1/tensors/x?placement=single&axis=-1", content=to_npy(b)), 400, "axis")
    check_problem(client.put("/v1/tensors/x?placement=shard&axis=-2", content=to_npy(b[0])), 400, "axis")
    check_problem(client.put("/v1/tensors/x?placement=shard", content=to_npy(b[:, : count - 1])), 400, "placement")
    assert client.get("/v1/tensors/x").status_code == 404


def test_a_product_in_parts_can_be_stored(client: httpx.Client) -> None:
    b, a = integers(8, 37), integers(5, 8)
    put(client, "w", b)
    stored = client.post("/v1/matmul?b=@w&store=@y&durable=true", content=to_safetensors({"a": a}))
    assert stored.status_code == 201, stored.text
    assert stored.json()["shape"] == [5, 37]
    np.testing.assert_array_equal(fetch(client, "y"), a @ b)


def test_a_tensor_of_more_than_one_quota_is_cut(client: httpx.Client, count: int) -> None:
    # 1.5 quotas of one device, by rows as a search wants it, and by columns.
    items = RNG.standard_normal((3 * QUOTA // 2 // 32, 8)).astype(np.float32)
    put(client, "items", items, "placement=auto")
    (one,) = client.get("/v1/tensors").json()
    assert (one["placement"], one["axis"], one["engines"]) == ("shard", -2, list(range(count)))
    kind = TensorType("float32", items.shape)
    parts = [part_of(kind, -2, index, count) for index in range(count)]
    assert one["parts"] == [
        {"engine": index, "begin": part.begin, "end": part.end, "bytes": part.type_of(kind).nbytes}
        for index, part in enumerate(parts)
    ]
    assert sum(part["bytes"] for part in one["parts"]) == items.nbytes
    assert settles(client, lambda now: total(now, "tilewire_resident_bytes") == items.nbytes)
    query = items[[17]]
    assert post(client, "/v1/search?b=@items&k=1&metric=l2", a=query)["indices"].item() == 17
    np.testing.assert_array_equal(fetch(client, "items"), items)
    # There is no room for as much again, and a refusal changes nothing, on any engine.
    large = RNG.standard_normal((8, 3 * count * QUOTA // 4 // 32)).astype(np.float32)
    check_problem(client.put("/v1/tensors/more?placement=shard", content=to_npy(large)), 507, "more")
    assert settles(client, lambda now: total(now, "tilewire_resident_bytes") == items.nbytes)
    put(client, "items", large)
    assert settles(client, lambda now: total(now, "tilewire_resident_bytes") == large.nbytes)
    np.testing.assert_array_equal(fetch(client, "items"), large)
    assert client.delete("/v1/tensors/items").status_code == 204
    assert settles(client, lambda now: total(now, "tilewire_resident_bytes") == 0)
    assert client.post("/v1/search?b=@items&k=1", content=to_safetensors({"a": query})).status_code == 404


@pytest.mark.slow
def test_an_engine_that_dies_takes_only_parts_with_it_and_brings_them_back(
    server: LiveServer, client: httpx.Client, count: int
) -> None:
    b, a = integers(8, 37), integers(5, 8)
    put(client, "w", b)
    put(client, "everywhere", b, "placement=replicate")
    # Parts without a byte, of names of each home.
    empty = {f"empty{n}": np.zeros((0, 4), np.float32) for n in range(4)}
    for name, array in empty.items():
        put(client, name, array)
    assert settles(client, lambda now: total(now, "tilewire_resident_tensors") == (2 + len(empty)) * count)
    dead = kill(server, client, count)
    seen = client.post("/v1/matmul?b=@w", content=to_safetensors({"a": a}))
    if seen.status_code != 200:
        check_problem(seen, 503, "a part of 'w'")
        assert "retry-after" in seen.headers
    np.testing.assert_array_equal(multiply(client, "/v1/matmul?b=@everywhere", a=a), a @ b)
    single = next(f"s{n}" for n in itertools.count() if home_of(f"s{n}", count) != dead)
    put(client, single, b, "placement=single")
    end_s = time.monotonic() + TIMEOUT_S
    while len(ready_devices(client)) < count:
        assert time.monotonic() < end_s
    np.testing.assert_array_equal(multiply(client, "/v1/matmul?b=@w", a=a), a @ b)
    np.testing.assert_array_equal(fetch(client, "w"), b)
    for name, array in empty.items():
        np.testing.assert_array_equal(fetch(client, name), array)
        np.testing.assert_array_equal(multiply(client, f"/v1/matmul?b=@{name}", a=a[:, :0]), np.zeros((5, 4)))
    put(client, "w", b + 1)
    np.testing.assert_array_equal(multiply(client, "/v1/matmul?b=@w", a=a), a @ (b + 1))


def test_no_request_sees_parts_of_two_versions(server: LiveServer, client: httpx.Client, count: int) -> None:
    width, ending = 64, threading.Event()
    one = to_safetensors({"a": np.ones((1, 1), np.float32)})
    put(client, "w", np.zeros((1, width), np.float32))
    trouble: list[str] = []
    reads = [0]

    def read(kind: str) -> None:
        with server.client() as mine:
            last = 0.0
            while not ending.is_set():
                if kind == "product":
                    got = mine.post("/v1/matmul?b=@w", content=one)
                else:
                    got = mine.get("/v1/tensors/w", headers={"accept": TYPES["safetensors"]})
                if got.status_code == 503:
                    continue
                if got.status_code != 200:
                    trouble.append(got.text)
                    return
                (values,) = from_safetensors(got.content).values()
                if len(np.unique(values)) != 1 or values.flat[0] < last:
                    trouble.append(f"{kind}: {values} after {last}")
                    return
                last = float(values.flat[0])
                reads[0] += 1

    readers = [threading.Thread(target=read, args=(kind,)) for kind in ("product", "get", "product", "get")]
    for reader in readers:
        reader.start()
    placements = itertools.cycle(
        ["placement=shard", "placement=shard", "placement=replicate", "placement=shard&axis=-1"]
    )
    for value in range(1, 120):
        put(client, "w", np.full((1, width), value, np.float32), next(placements))
    ending.set()
    for reader in readers:
        reader.join(TIMEOUT_S)
    assert not trouble
    assert reads[0] > 100


def test_a_deadline_that_passes_is_one_refusal(client: httpx.Client) -> None:
    b, a = integers(8, 37), integers(5, 8)
    put(client, "w", b)
    late = client.post("/v1/matmul?b=@w&timeout_ms=0.000001", content=to_safetensors({"a": a}))
    check_problem(late, 504, "deadline")
    np.testing.assert_array_equal(multiply(client, "/v1/matmul?b=@w", a=a), a @ b)
