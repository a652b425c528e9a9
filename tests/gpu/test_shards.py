"""Residents in parts on two GPUs: right answers for every dtype, and what a second device is worth.

One device is enough for what writes a part among the columns of others.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tilewire
from tests.support.live_server import serving
from tests.support.transfers import download, uploaded
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.host import TORCH_DTYPES
from tilewire.service.ipc.arena import Segment
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import part_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")

MIB, GIB = 2**20, 2**30
QUOTA = 256 * MIB
FLAGS = ("--device", "cuda:0,1", "--gateways", "1", "--no-spare-engine")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tilewire.Client]:
    path: Path = tmp_path_factory.mktemp("shards") / "log"
    with (
        serving(path, *FLAGS, *bodies_up_to(2 * GIB), "--resident-bytes", f"{QUOTA}") as server,
        tilewire.Client(server.url, timeout=300) as client,
    ):
        yield client


def bodies_up_to(num_bytes: int) -> tuple[str, ...]:
    """Flags for bodies of up to `num_bytes`, two at a time."""
    return ("--max-body-bytes", f"{num_bytes}", "--arena-bytes", f"{2 * num_bytes}")


def integers(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Small integers: their sums are exact in every dtype."""
    values: np.ndarray = np.random.default_rng(seed).integers(-2, 3, shape).astype(DTYPES[dtype])
    return values


@two_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 4096), (5, 100, 1001), (300, 256, 2050), (4096, 64, 4096)])
def test_products_in_parts_are_whole(client: tilewire.Client, dtype: str, m: int, k: int, n: int) -> None:
    a, b = integers(1, m, k, dtype=dtype), integers(2, k, n, dtype=dtype)
    bias = integers(3, n).astype(np.int32 if dtype == "int8" else np.float32)
    expected = a.astype(np.float32) @ b.astype(np.float32) + bias
    kept = client.put("shard/w", b, placement="shard")
    turned = client.put("shard/turned", np.ascontiguousarray(b.T), placement="shard", axis=-2)
    # Again and again: prepared launches, which come with the second, have the columns of the others, too.
    for _ in range(3):
        np.testing.assert_array_equal(client.matmul(a, kept, bias=bias).astype(np.float32), expected)
        got = client.matmul(a, turned, bias=bias, transpose_b=True)
        np.testing.assert_array_equal(got.astype(np.float32), expected)
    np.testing.assert_array_equal(kept.fetch().astype(np.float32), b.astype(np.float32))
    np.testing.assert_array_equal(turned.fetch().astype(np.float32), b.T.astype(np.float32))


@two_devices
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("k", [1, 10, 1000])
def test_searches_in_parts_find_what_one_device_finds(client: tilewire.Client, metric: Any, k: int) -> None:
    # Few values: most scores are equal to others.
    items, queries = integers(4, 5001, 16), integers(5, 7, 16)
    parts = client.put("shard/items", items, placement="shard", axis=-2)
    whole = client.put("shard/whole", items, placement="replicate")
    for _ in range(3):
        got, expected = (client.search(queries, one, k=k, metric=metric) for one in (parts, whole))
        np.testing.assert_array_equal(got.indices, expected.indices)
        np.testing.assert_array_equal(got.values, expected.values)


@two_devices
def test_one_and_a_half_quotas_are_one_tensor(client: tilewire.Client) -> None:
    # Which there are depends on the tests that this process has run before.
    for one in client.tensors():
        client.delete(one.name)
    k = 4096
    b = np.random.default_rng(6).standard_normal((k, 3 * QUOTA // 2 // k // 4), dtype=np.float32)
    kept = client.put("shard/large", b)
    (info,) = (one.described for one in client.tensors() if one.name == kept.name)
    assert info is not None
    assert (info.placement, info.axis, info.engines) == ("shard", -1, (0, 1))
    a = np.random.default_rng(7).standard_normal((8, k), dtype=np.float32)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(client.matmul(a, kept), expected, rtol=1e-4, atol=1e-3)
    client.delete("shard/large")


@pytest.mark.alone
@two_devices
def test_a_product_bound_by_memory_takes_little_more_than_half_the_time(tmp_path: Path) -> None:
    """At most 0.6 of one device. What is around a product over HTTP is not halved, so the weight is large."""
    n, ratios, report = 131072, {}, []
    with (
        serving(tmp_path / "log", *FLAGS, *bodies_up_to(17 * GIB), "--resident-bytes", f"{40 * GIB}") as server,
        tilewire.Client(server.url, timeout=300) as client,
    ):
        for gib in (4, 16):
            k = gib * GIB // n // 2
            b = np.zeros((k, n), ml_dtypes.bfloat16)
            a = np.ones((1, k), ml_dtypes.bfloat16)
            single = client.put("one", b, placement="single")
            shard = client.put("both", b, placement="shard")
            one_s, both_s = (median_s(functools.partial(client.matmul, a, kept)) for kept in (single, shard))
            ratios[gib] = both_s / one_s
            report.append(
                f"{gib} GiB: {one_s * 1e6:.0f} us on one device, {both_s * 1e6:.0f} us on two: {ratios[gib]:.2f}"
            )
            print(report[-1])
            client.delete("one")
            client.delete("both")
    assert ratios[16] <= 0.6, report


def median_s(run: Callable[[], object], count: int = 50) -> float:
    for _ in range(5):
        run()
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("shape", "axis"), [((37, 1001), -1), ((1001, 37), -2), ((3, 40, 50), -2), ((5, 8, 7), -1)])
@pytest.mark.parametrize("way", ["pinned", "not pinned", "download"])
def test_parts_are_written_where_they_belong(dtype: str, shape: tuple[int, ...], axis: int, way: str) -> None:
    # Not at the top: it imports Triton, which the kernels' tests put into its interpreter first.
    from tilewire.service.engine.backends.gpu.backend import GpuBackend
    from tilewire.service.engine.backends.gpu.staging import Staging

    backend, kind = GpuBackend("cuda:0"), TensorType(dtype, shape)
    segment, staging = Segment.create("parts", 2**20), Staging(torch.device("cuda:0"))
    mapped = backend.attach(segment)
    if way == "pinned":
        staging.add_mapped(mapped)
    whole = torch.arange(kind.num_elements).remainder(97).to(TORCH_DTYPES[dtype]).view(shape)
    mapped.fill_(7)
    for index in range(3):
        part = part_of(kind, axis, index, 3)
        cut = whole.narrow(axis, part.begin, part.end - part.begin).contiguous()
        held = uploaded(backend, HostBytes(cut.view(-1).view(torch.uint8), part.type_of(kind), 0))
        if way == "download":
            download(backend, held, HostBytes(mapped, kind, 256), part)
            continue
        rows, pitch = part.rows_in(kind)
        out = HostBytes(mapped, rows, 256 + part.offset_in(kind), pitch=pitch)
        staging.scatter([(held.contiguous().view(rows.shape), [out])], [])
        torch.cuda.synchronize()
    got = mapped[256 : 256 + kind.nbytes].clone().view(TORCH_DTYPES[dtype]).view(shape)
    torch.testing.assert_close(got, whole, rtol=0, atol=0)
    assert (mapped[:256] == 7).all()
    assert (mapped[256 + kind.nbytes :][:256] == 7).all()
    backend.detach(mapped)
