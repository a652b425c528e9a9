"""The whole service on a GPU: a real server, real sockets, every op and dtype against an oracle in float64."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import tilewire
from tilewire.service.cli.launch import running_server
from tilewire.service.engine.loop.loop import FLUSH_S

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
# Half a unit in the last place of the result's type, relative, and room for float32 accumulation over K.
RELATIVE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5, "float8_e4m3fn": 8e-3, "float8_e5m2": 8e-3}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server("--device", "cuda:0", "--gateways", "2") as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[tilewire.Client]:
    with tilewire.Client(url, timeout=300) as client:
        yield client


def error_of(result: np.ndarray, expected: np.ndarray, scale: np.ndarray) -> float:
    """Largest error relative to Σ|a||b|, the natural size of a product's rounding errors."""
    return float(np.max(np.abs(result.astype(np.float64) - expected) / np.maximum(scale, 1e-30)))


def test_large_operands_with_rows_of_odd_length(client: tilewire.Client) -> None:
    # 240 MB each, whose rows are laid out anew on the way to the device: more blocks than a grid has along its second axis.
    rng = np.random.default_rng(1)
    a: np.ndarray = rng.integers(-2, 3, (4, 60_001)).astype(np.float16)
    b: np.ndarray = rng.integers(-2, 3, (60_001, 2001)).astype(np.float16)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.array_equal(client.matmul(a, b), expected.astype(np.float16))
    assert np.array_equal(
        client.matmul(np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)), expected.T.astype(np.float16)
    )
    handle = client.put("odd", b)
    assert np.array_equal(client.matmul(a, handle), expected.astype(np.float16))
    handle.delete()
    assert np.array_equal(client.reduce(b, "max", axis=-1), b.max(-1))
    values, indices = client.topk(b, 1)
    assert np.array_equal(values[:, 0], b.max(-1))
    assert np.array_equal(indices[:, 0], b.argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(16, 4096, 512), (257, 781, 127), (1024, 1024, 1024), (1, 64, 64)])
def test_matmul_is_right(client: tilewire.Client, dtype: str, m: int, k: int, n: int) -> None:
    rng = np.random.default_rng(m * k + n)
    a: np.ndarray = rng.standard_normal((m, k)).astype(DTYPES[dtype])
    b: np.ndarray = rng.standard_normal((k, n)).astype(DTYPES[dtype])
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    result = client.matmul(a, b)
    assert result.shape == (m, n)
    assert error_of(result, wide_a @ wide_b, np.abs(wide_a) @ np.abs(wide_b)) < RELATIVE[dtype]


def test_int8_matmul_is_exact(client: tilewire.Client) -> None:
    rng = np.random.default_rng(8)
    a = rng.integers(-128, 128, (100, 300), dtype=np.int8)
    b = rng.integers(-128, 128, (300, 50), dtype=np.int8)
    np.testing.assert_array_equal(client.matmul(a, b), a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_resident_weight_with_epilogue(client: tilewire.Client, dtype: str) -> None:
    rng = np.random.default_rng(9)
    w = rng.standard_normal((512, 256)).astype(DTYPES[dtype])
    x = rng.standard_normal((33, 512)).astype(DTYPES[dtype])
    bias = rng.standard_normal(256).astype(np.float32)
    client.put(f"gpu/{dtype}", w)
    wide = x.astype(np.float64) @ w.astype(np.float64) + bias
    scale = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)) + np.abs(bias)
    result = client.matmul(x, f"@gpu/{dtype}", bias=bias, activation="relu")
    assert error_of(result, np.maximum(wide, 0), scale) < RELATIVE[dtype]
    client.delete(f"gpu/{dtype}")


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_8_bit_weights_are_laid_out_at_upload_and_come_back_as_they_were(client: tilewire.Client, dtype: str) -> None:
    rng = np.random.default_rng(13)
    kind = np.int8 if dtype == "int8" else DTYPES[dtype]
    w: np.ndarray = rng.integers(-8, 8, (300, 130)).astype(kind)
    x: np.ndarray = rng.integers(-8, 8, (17, 300)).astype(kind)
    client.put(f"gpu/{dtype}", w)
    assert client.get(f"gpu/{dtype}").tobytes() == w.tobytes()
    expected = x.astype(np.float64) @ w.astype(np.float64)
    scale = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64))
    result = client.matmul(x, f"@gpu/{dtype}")
    assert error_of(result, expected, scale) < RELATIVE.get(dtype, 1e-12)
    client.delete(f"gpu/{dtype}")


@pytest.mark.parametrize("width", [96, 101])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lone_requests_of_a_kind_each_get_their_own_result(client: tilewire.Client, dtype: str, width: int) -> None:
    """The second of a kind is prepared; a replaced weight is another kind."""
    rng = np.random.default_rng(16)
    for rows in (1, 3):
        for _weight in range(2):
            w: np.ndarray = rng.integers(-4, 4, (width, width)).astype(DTYPES[dtype])
            client.put("gpu/alone", w)
            for _ in range(4):
                x: np.ndarray = rng.integers(-4, 4, (rows, width)).astype(DTYPES[dtype])
                wide = x.astype(np.float64)
                expected = (wide @ w.astype(np.float64)).astype(x.dtype)
                np.testing.assert_array_equal(client.matmul(x, "@gpu/alone"), expected)
                np.testing.assert_array_equal(client.matmul(x, w), expected)
                np.testing.assert_array_equal(client.add(x, x, alpha=2), (3 * wide).astype(x.dtype))
                soft = client.softmax(x, axis=0).astype(np.float64)
                shifted = np.exp(wide - wide.max(0))
                np.testing.assert_allclose(soft, shifted / shifted.sum(0), rtol=1e-2, atol=1e-6)
    client.delete("gpu/alone")


@pytest.mark.parametrize("width", [96, 101])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_batches_give_each_its_own_result(url: str, client: tilewire.Client, dtype: str, width: int) -> None:
    """Rows against one weight, softmax, sums and unequal products, many at once: small integers, so every result is exact."""
    rng = np.random.default_rng(14)
    w: np.ndarray = rng.integers(-4, 4, (width, width)).astype(DTYPES[dtype])
    client.put(f"gpu/shared/{dtype}/{width}", w)
    sizes: list[int] = []

    def one(number: int) -> bool:
        rng = np.random.default_rng(number)
        x: np.ndarray = rng.integers(-4, 4, (1 + number % 7, width)).astype(DTYPES[dtype])
        b: np.ndarray = rng.integers(-4, 4, (width, 1 + number % 31)).astype(DTYPES[dtype])
        wide = x.astype(np.float64)
        is_right = True
        with tilewire.Client(url, timeout=300) as own:
            for _ in range(6):
                answer = own.run("matmul", {"a": x, "b": f"@gpu/shared/{dtype}/{width}"})
                sizes.append(answer.batch_size or 0)
                is_right &= np.array_equal(
                    answer.array.astype(np.float64), (wide @ w.astype(np.float64)).astype(x.dtype)
                )
                is_right &= np.array_equal(own.matmul(x, b), (wide @ b.astype(np.float64)).astype(x.dtype))
                is_right &= np.array_equal(own.add(x, x, alpha=2), (3 * wide).astype(x.dtype))
                shifted = np.exp(wide - wide.max(-1, keepdims=True))
                soft = own.softmax(x).astype(np.float64)
                is_right &= bool(np.allclose(soft, shifted / shifted.sum(-1, keepdims=True), rtol=1e-2, atol=1e-6))
        return is_right

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(one, range(24)))
    assert max(sizes) > 1
    client.delete(f"gpu/shared/{dtype}/{width}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_requests_that_go_in_parts_are_right_in_every_row(client: tilewire.Client, dtype: str) -> None:
    """Small integers, so that every sum is exact; the last part is shorter than the others."""
    rng = np.random.default_rng(17)
    rows, k, n = 5000, 8192 // np.dtype(DTYPES[dtype]).itemsize, 1024
    a: np.ndarray = rng.integers(-2, 3, (rows, k)).astype(DTYPES[dtype])
    b: np.ndarray = rng.integers(-2, 3, (k, n)).astype(DTYPES[dtype])
    expected = np.maximum(a.astype(np.float32) @ b.astype(np.float32), 0).astype(a.dtype)
    np.testing.assert_array_equal(client.matmul(a, b, activation="relu"), expected)
    client.put("gpu/large", b)
    np.testing.assert_array_equal(client.matmul(a, "@gpu/large", activation="relu"), expected)
    client.delete("gpu/large")
    np.testing.assert_array_equal(client.add(a, a, alpha=2), 3 * a)
    shifted = np.exp(a.astype(np.float64) - 2)
    soft = client.softmax(a).astype(np.float64)
    np.testing.assert_allclose(
        soft, shifted / shifted.sum(-1, keepdims=True), rtol=2e-2 if dtype == "bfloat16" else 1e-5
    )


@pytest.mark.parametrize("shape", [(7, 13), (64, 4096), (3, 1_000_003)])
@pytest.mark.parametrize("log", [False, True])
def test_softmax_is_right(client: tilewire.Client, shape: tuple[int, int], log: bool) -> None:
    x = np.random.default_rng(10).standard_normal(shape).astype(np.float32)
    wide = x.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    expected = logs if log else np.exp(logs)
    np.testing.assert_allclose(client.softmax(x, log=log), expected, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.float16])
def test_add_is_right(client: tilewire.Client, dtype: type) -> None:
    rng = np.random.default_rng(11)
    a: np.ndarray = (rng.standard_normal((300, 777)) * 100).astype(dtype)
    b: np.ndarray = (rng.standard_normal((1, 777)) * 100).astype(dtype)
    expected = a.astype(np.float64) + 3 * b.astype(np.float64)
    np.testing.assert_allclose(client.add(a, b, alpha=3).astype(np.float64), expected, rtol=1e-3, atol=1e-6)


def test_answers_are_not_mixed(url: str) -> None:
    """Distinct requests in flight on all streams at once; each answer is that of its own request."""

    def one(number: int) -> bool:
        rng = np.random.default_rng(number)
        x = rng.integers(-8, 8, (1 + number % 40, 64)).astype(np.float32)
        w = rng.integers(-8, 8, (64, 1 + number % 50)).astype(np.float32)
        with tilewire.Client(url, timeout=300) as client:
            return all(np.array_equal(client.matmul(x, w), x @ w) for _ in range(8))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(64)))


def counted(url: str, name: str) -> float:
    """The counter `name` of float16 matmul in `/metrics`, once every process has handed its figures over."""
    time.sleep(4 * FLUSH_S)
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name == name and sample.labels == {"op": "matmul", "dtype": "float16"}:
                return sample.value
    raise AssertionError(f"{name} is not in /metrics")


def test_metrics_show_tflops(url: str, client: tilewire.Client) -> None:
    a = np.random.default_rng(12).standard_normal((2048, 2048)).astype(np.float16)
    client.matmul(a, a)
    flops, seconds = [], []
    for request in range(6):
        if request:
            client.matmul(a, a)
        flops.append(counted(url, "tilewire_flops_total"))
        seconds.append(counted(url, "tilewire_kernel_seconds_total"))
    assert flops[-1] - flops[0] == 5 * 2 * 2048**3
    # Other tests may have the device for a while in between, but not in every product.
    quickest = min(end - start for start, end in itertools.pairwise(seconds))
    assert 2 * 2048**3 / quickest * 1e-12 > 10
    assert 'backend="gpu"' in httpx.get(f"{url}/metrics").text


def test_a_request_too_large_for_the_device_is_refused_and_costs_nothing(client: tilewire.Client) -> None:
    with pytest.raises(tilewire.TilewireError):
        client.matmul(np.ones((2**17, 1), np.float32), np.ones((1, 2**17), np.float32))
    np.testing.assert_array_equal(client.add(np.ones(3, np.float32), np.ones(3, np.float32)), np.full(3, 2, np.float32))


# Each with one input that travels. Rows of 777 begin at different places of 16 bytes in a batch, and several programs share
# one of 20,001.
INVARIANT: dict[str, Callable[[tilewire.Client, np.ndarray], Any]] = {
    "matmul": lambda client, x: client.matmul(x, "@w"),
    "softmax": lambda client, x: client.softmax(x),
    "search": lambda client, x: client.search(x, "@items", 5),
    "topk": lambda client, x: client.topk(x, 5),
    "reduce": lambda client, x: client.reduce(x[:, :775], "sum"),
    "reduce long": lambda client, x: client.reduce(np.resize(x, (len(x), 20_001)), "norm"),
    "normalize": lambda client, x: client.normalize(x, "rms"),
    "normalize long": lambda client, x: client.normalize(np.resize(x, (len(x), 20_001)), "layer"),
    "pointwise": lambda client, x: client.pointwise("gelu", x),
}


def bits_of(result: Any) -> bytes:
    """Those of an array, or of each of several."""
    return b"".join(each.tobytes() for each in ((result,) if isinstance(result, np.ndarray) else tuple(result)))


@pytest.mark.parametrize(("width", "columns"), [(1000, 300), (777, 333)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_gives_the_bits_of_a_request_alone(dtype: str, width: int, columns: int) -> None:
    rng = np.random.default_rng(15)
    inputs = [rng.standard_normal((rows, width)).astype(DTYPES[dtype]) for rows in (1, 3, 16, 70)]
    with running_server("--device", "cuda:0", "--gateways", "2", "--batch-invariant") as url:
        with tilewire.Client(url, timeout=300) as client:
            client.put("w", rng.standard_normal((width, columns)).astype(DTYPES[dtype]))
            client.put("items", rng.standard_normal((columns, width)).astype(DTYPES[dtype]))
            alone = {(name, len(x)): bits_of(call(client, x)) for name, call in INVARIANT.items() for x in inputs}
        sizes: list[int] = []

        def one(number: int) -> list[str]:
            wrong = []
            with tilewire.Client(url, timeout=300) as own:
                for x in inputs[number % 4 :] + inputs[: number % 4]:
                    sizes.append(own.run("matmul", {"a": x, "b": "@w"}).batch_size or 0)
                    wrong += [name for name, call in INVARIANT.items() if bits_of(call(own, x)) != alone[name, len(x)]]
            return wrong

        with ThreadPoolExecutor(24) as pool:
            assert [name for wrong in pool.map(one, range(96)) for name in wrong] == []
    assert max(sizes) > 1


def test_a_start_tells_its_stages_and_lists_its_kernels(url: str) -> None:
    # Not at the top: it imports Triton, which the kernels' tests put into its interpreter first.
    from tilewire.kernels.registry import KERNEL_OPS

    devices = httpx.get(f"{url}/v1/kernels").json()["devices"]
    assert [device["backend"] for device in devices] == ["gpu"]
    assert all(variant["registers"] > 0 for device in devices for variant in device["variants"])
    assert {variant["op"] for variant in devices[0]["variants"]} == {op.name for op in KERNEL_OPS}


def test_what_is_replayed_is_right_for_every_request_and_every_resident(client: tilewire.Client) -> None:
    """A graph holds addresses: requests write other operands there, and another resident has a graph of its own."""
    rng = np.random.default_rng(21)
    text = {
        "inputs": {"x": {"dtype": "float32", "shape": [-1, 64]}},
        "steps": [
            {"op": "matmul", "inputs": {"a": "x", "b": "@gpu/replayed"}, "options": {"activation": "relu"}, "as": "h"},
            {
                "op": "search",
                "inputs": {"a": "h", "b": "@gpu/found"},
                "options": {"k": 3, "metric": "l2"},
                "as": ["d", "i"],
            },
        ],
        "outputs": ["h", "d", "i"],
    }
    for _ in range(3):
        w = rng.standard_normal((64, 32), dtype=np.float32)
        items = rng.standard_normal((5000, 32), dtype=np.float32)
        client.put("gpu/replayed", w)
        client.put("gpu/found", items)
        program = client.program("gpu-replay", text)
        for number in range(6):
            x = rng.standard_normal((1 + number % 2, 64), dtype=np.float32)
            found = program.run({"x": x}).outputs
            h = np.maximum(x.astype(np.float64) @ w, 0)
            np.testing.assert_allclose(found["h"], h, rtol=1e-3, atol=1e-3)
            distances = ((h[:, None] - items[None]) ** 2).sum(-1)
            np.testing.assert_array_equal(found["i"], distances.argsort(axis=-1)[:, :3])
            _, indices = client.search(x[:, :32], "@gpu/found", k=3, metric="l2")
            near = ((x[:, None, :32].astype(np.float64) - items[None]) ** 2).sum(-1)
            np.testing.assert_array_equal(indices, near.argsort(axis=-1)[:, :3])
