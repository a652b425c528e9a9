"""Shared memory on a GPU: regions that the device reads and writes in place, and objects that are cut under it."""

from __future__ import annotations

import json
import mmap
import os
import platform
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch

from tests.support.shared_objects import shared_object
from tests.support.tensor_bodies import Array
from tests.support.transfers import download, uploaded
from tilewire.service.cli.launch import running_server
from tilewire.service.engine.backends.contract import HostBytes, LaunchSpec
from tilewire.service.engine.backends.gpu.pinning import PIECE_BYTES, pin, unpin
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.batching import launch_of
from tilewire.service.ipc.arena import Segment
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.registry import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SYSTEM = "/v2/systemsharedmemory"
DATATYPES = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "int8": "INT8", "int32": "INT32"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server("--device", "cuda:0", "--gateways", "2", "--allow-shared-memory") as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        yield client
        client.post(f"{SYSTEM}/unregister")


def register(client: httpx.Client, name: str, path: Path, offset: int = 0) -> None:
    body = {"key": path.name, "offset": offset, "byte_size": path.stat().st_size - offset}
    answer = client.post(f"{SYSTEM}/region/{name}/register", json=body)
    assert answer.status_code == 200, answer.text


def place(region: str, nbytes: int, offset: int) -> dict[str, object]:
    return {
        "shared_memory_region": region,
        "shared_memory_byte_size": nbytes,
        **({"shared_memory_offset": offset} if offset else {}),
    }


def given(name: str, array: Array, region: str, offset: int = 0) -> dict[str, object]:
    return {
        "name": name,
        "datatype": DATATYPES[array.dtype.name],
        "shape": list(array.shape),
        "parameters": place(region, array.nbytes, offset),
    }


def infer(client: httpx.Client, model: str, inputs: list[dict[str, object]], out: dict[str, object]) -> httpx.Response:
    request = {"inputs": inputs, "outputs": [{"name": "out", "parameters": out}]}
    return client.post(f"/v2/models/{model}/infer", content=json.dumps(request))


def read(path: Path, like: Array, offset: int = 0) -> Array:
    return np.frombuffer(path.read_bytes()[offset : offset + like.nbytes], like.dtype).reshape(like.shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize(("m", "k", "n"), [(3, 5, 7), (64, 4096, 128), (257, 781, 127), (2048, 1024, 2048)])
@pytest.mark.parametrize("offset", [0, 3, 4096 + 8])
def test_products_from_and_to_regions(client: httpx.Client, dtype: str, m: int, k: int, n: int, offset: int) -> None:
    """Small integers, so that every product is exact: small and large copies, aligned and not, padded and not."""
    kind = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, np.dtype(dtype))
    rng = np.random.default_rng(m * k + n)
    most = 1 if dtype != "int8" else 8
    a: Array = rng.integers(-most, most + 1, (m, k)).astype(kind)
    b: Array = rng.integers(-most, most + 1, (k, n)).astype(kind)
    wide = a.astype(np.float64) @ b.astype(np.float64)
    expected: Array = wide.astype(np.int32 if dtype == "int8" else kind)
    with (
        shared_object(bytes(offset) + a.tobytes() + b.tobytes()) as source,
        shared_object(offset + expected.nbytes + 1) as target,
    ):
        register(client, "in", source)
        register(client, "out", target)
        inputs = [given("a", a, "in", offset), given("b", b, "in", offset + a.nbytes)]
        answer = infer(client, "matmul", inputs, place("out", expected.nbytes, offset))
        assert answer.status_code == 200, answer.text
        np.testing.assert_array_equal(read(target, expected, offset), expected)
        content = target.read_bytes()
        assert content[:offset] == bytes(offset)
        assert content[offset + expected.nbytes :] == b"\0"
        assert source.read_bytes()[offset:] == a.tobytes() + b.tobytes()
        client.post(f"{SYSTEM}/unregister")


def test_each_of_many_gets_its_own(url: str) -> None:
    """Batches whose operands lie in regions of different clients, beside others in the arena."""

    def one(number: int) -> bool:
        array: Array = np.full((1 + number % 5, 96), number, np.float32)
        with (
            shared_object(array.tobytes() + bytes(array.nbytes)) as path,
            httpx.Client(base_url=url, timeout=300, trust_env=False) as own,
        ):
            register(own, f"many-{number}", path)
            is_right = True
            for turn in range(8):
                inputs = [given(name, array, f"many-{number}") for name in "ab"]
                if turn % 2:
                    inputs[1] = {"name": "b", "datatype": "FP32", "shape": list(array.shape), "data": array.tolist()}
                answer = infer(own, "add", inputs, place(f"many-{number}", array.nbytes, array.nbytes))
                is_right &= answer.status_code == 200
                is_right &= np.array_equal(read(path, array, array.nbytes), array * 2)
            own.post(f"{SYSTEM}/region/many-{number}/unregister")
        return is_right

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(48)))


@pytest.mark.parametrize("nbytes", [2**12, 2**20, 2**23])
def test_an_object_that_is_cut_all_the_time_ends_no_engine(client: httpx.Client, nbytes: int) -> None:
    array: Array = np.ones(nbytes // 4, np.float32)
    build = engine_starts(client)
    with shared_object(array.tobytes()) as path:
        register(client, "cut", path)
        done = threading.Event()

        def cut() -> None:
            while not done.is_set():
                os.truncate(path, 0)
                os.truncate(path, nbytes)

        thread = threading.Thread(target=cut)
        thread.start()
        try:
            for _ in range(100):
                inputs = [given("a", array, "cut"), given("b", array, "cut")]
                answer = infer(client, "add", inputs, place("cut", nbytes, 0))
                assert answer.status_code in (200, 400), answer.text
        finally:
            done.set()
            thread.join()
    assert engine_starts(client) == build


def engine_starts(client: httpx.Client) -> list[str]:
    text = client.get("/metrics").text
    return [line for line in text.splitlines() if line.startswith("tilewire_engine_restarts_total")]


@pytest.mark.skipif(
    torch.version.hip is not None or platform.machine() != "x86_64", reason="regions are copied on this machine"
)
def test_the_device_reads_and_writes_pages_that_the_file_has_lost() -> None:
    """What the design rests on: pinned pages stay the device's after a cut, for small copies and for large ones."""
    from tilewire.service.engine.backends.gpu.backend import GpuBackend

    backend = GpuBackend("cuda:0")
    # The last lies over seams of what is pinned.
    for elements in (1, 1000, 2**18, 2**22, 3 * 2**23 + 1000):
        kind = TensorType("float32", (elements,))
        with shared_object(np.full(elements, 3, np.float32).tobytes()) as path:
            fd = os.open(path, os.O_RDWR)
            mapped = backend.adopt(fd, 0, kind.nbytes)
            assert mapped is not None
            os.truncate(path, 0)
            place_of = HostBytes(mapped, kind, 0, is_foreign=True)
            doubled = launch_of(OPS["add"], AddOptions(), {"a": place_of, "b": place_of}, [place_of])
            for _ in range(2):
                backend.begin([doubled]).wait()
            both = ([place_of, place_of], (2 * elements,))
            pair = LaunchSpec(OPS["add"], AddOptions(), {"a": both, "b": both}, {}, [both])
            backend.begin([pair]).wait()
            assert path.stat().st_size == 0
            # 3 doubled twice; then a batch of two equal sums doubles it once more.
            there = torch.empty(elements, dtype=torch.float32)
            out = HostBytes(there.view(torch.uint8), kind, 0)
            inputs: dict[str, HostBytes | torch.Tensor] = {"a": place_of, "b": place_of}
            backend.begin([launch_of(OPS["add"], AddOptions(alpha=0), inputs, [out])]).wait()
            assert there.unique().tolist() == [24.0]
            backend.detach(mapped)
            del mapped, place_of, doubled, both, pair, inputs
            os.close(fd)


@pytest.mark.skipif(
    torch.version.hip is not None or platform.machine() != "x86_64", reason="regions are copied on this machine"
)
@pytest.mark.parametrize(("nbytes", "left"), [(2**20, 0), (4 * PIECE_BYTES, 2 * PIECE_BYTES)])
def test_a_registration_that_fails_leaves_no_error_and_nothing_pinned_behind(nbytes: int, left: int) -> None:
    from tilewire.service.engine.backends.gpu.backend import GpuBackend

    backend = GpuBackend("cuda:0")
    with shared_object(nbytes) as path:
        fd = os.open(path, os.O_RDWR)
        mapping = mmap.mmap(fd, nbytes)
        os.truncate(path, left)
        lost = torch.frombuffer(mapping, dtype=torch.uint8)
        assert backend._register(lost) is False
        assert backend.adopt(fd, 0, nbytes) is None
        if left:
            # What was pinned before the piece that failed is not: the driver pins nothing twice.
            assert pin(lost[:left]) == 0
            unpin(lost[:left])
        os.close(fd)
    assert torch.ones(3, device="cuda:0").sum().item() == 3


@pytest.mark.parametrize(("elements", "offset"), [(1000, PIECE_BYTES - 1024), (2 * PIECE_BYTES // 4 + 500, 512)])
def test_tensors_over_seams_come_and_go_whole(elements: int, offset: int) -> None:
    from tilewire.service.engine.backends.gpu.backend import GpuBackend

    backend, kind = GpuBackend("cuda:0"), TensorType("float32", (elements,))
    segment = Segment.create("seams", 8 * PIECE_BYTES)
    mapped = backend.attach(segment)
    source = HostBytes(mapped, kind, offset)
    target = HostBytes(mapped, kind, 4 * PIECE_BYTES + offset)
    values = torch.arange(elements, dtype=torch.float32)
    tensor_of(source).copy_(values)
    held = uploaded(backend, source)
    torch.testing.assert_close(held.cpu(), values, rtol=0, atol=0)
    download(backend, held, target)
    torch.testing.assert_close(tensor_of(target), values, rtol=0, atol=0)
    backend.begin([launch_of(OPS["add"], AddOptions(), {"a": source, "b": target}, [target])]).wait()
    torch.testing.assert_close(tensor_of(target), 2 * values, rtol=0, atol=0)
    backend.detach(mapped)


def test_a_read_only_object_is_copied(client: httpx.Client) -> None:
    array: Array = np.arange(1000, dtype=np.float32)
    with shared_object(array.tobytes()) as path, shared_object(array.nbytes) as target:
        path.chmod(0o444)
        register(client, "ro", path)
        register(client, "rw", target)
        inputs = [given("a", array, "ro"), given("b", array, "ro")]
        assert infer(client, "add", inputs, place("rw", array.nbytes, 0)).status_code == 200
        np.testing.assert_array_equal(read(target, array), array * 2)
        assert infer(client, "add", inputs, place("ro", array.nbytes, 0)).status_code == 400


def test_softmax_and_nothing(client: httpx.Client) -> None:
    x: Array = np.zeros((300, 1001), np.float32)
    with shared_object(x.tobytes()) as path:
        register(client, "r", path)
        assert infer(client, "softmax", [given("x", x, "r")], place("r", x.nbytes, 0)).status_code == 200
        np.testing.assert_allclose(read(path, x), 1 / 1001, rtol=1e-6)
        empty: Array = np.zeros((0, 7), np.float32)
        assert infer(client, "softmax", [given("x", empty, "r")], place("r", 0, 0)).status_code == 200
