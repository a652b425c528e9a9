"""Tensors in shared memory, end to end: the protocol's own client, real objects, both gateways, engines that die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from ml_dtypes import bfloat16
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from tritonclient.utils import shared_memory as shm

from tests.conftest import SMALL, StartServer
from tests.exposition import is_idle, settles
from tests.live_server import LiveServer, serving
from tests.shared_objects import PREFIX, shared_object
from tests.tensor_bodies import Array, to_npy

PATIENCE_S = 30.0
A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(20, dtype=np.float32).reshape(4, 5)
DATATYPES = {np.dtype(bfloat16): "BF16"}


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("sharing") / "log", *SMALL, "--allow-shared-memory") as server:
        yield server


@pytest.fixture
def client(sharing: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with connected(sharing) as client:
        yield client


@contextlib.contextmanager
def connected(server: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=4) as client:
        yield client
        with contextlib.suppress(InferenceServerException):
            client.unregister_system_shared_memory()


@pytest.fixture
def regions(client: triton.InferenceServerClient) -> Iterator[Regions]:
    with contextlib.ExitStack() as stack:
        yield Regions(client, stack)


class Regions:
    """Objects and the regions made of them."""

    def __init__(self, client: triton.InferenceServerClient, stack: contextlib.ExitStack) -> None:
        self.client = client
        self._stack = stack

    def add(self, name: str, content: bytes | int, offset: int = 0) -> Path:
        """An object, all of which from `offset` on is a region."""
        path = self._stack.enter_context(shared_object(content))
        self.client.register_system_shared_memory(name, f"/{path.name}", path.stat().st_size - offset, offset)
        return path


def given(name: str, array: Array, region: str | None = None, offset: int = 0) -> triton.InferInput:
    datatype = DATATYPES.get(array.dtype) or np_to_triton_dtype(array.dtype)
    one = triton.InferInput(name, list(array.shape), datatype)
    if region is None:
        return one.set_data_from_numpy(array)
    return one.set_shared_memory(region, array.nbytes, offset)


def wanted(region: str, byte_size: int, offset: int = 0) -> triton.InferRequestedOutput:
    out = triton.InferRequestedOutput("out")
    out.set_shared_memory(region, byte_size, offset)
    return out


def read(path: Path, like: Array, offset: int = 0) -> Array:
    return np.frombuffer(path.read_bytes()[offset : offset + like.nbytes], like.dtype).reshape(like.shape)


def infer(
    client: triton.InferenceServerClient,
    model: str,
    inputs: Sequence[triton.InferInput],
    out: triton.InferRequestedOutput | None = None,
) -> triton.InferResult:
    return client.infer(model, inputs, outputs=None if out is None else [out])


def refused(status: int, text: str) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(InferenceServerException, match=rf"^\[{status}\] .*{text}")


def test_operands_and_result_in_regions(regions: Regions) -> None:
    regions.add("in", A.tobytes() + B.tobytes())
    out = regions.add("out", 60)
    result = infer(regions.client, "matmul", [given("a", A, "in"), given("b", B, "in", A.nbytes)], wanted("out", 60))
    assert result.get_response()["outputs"] == [{"name": "out", "datatype": "FP32", "shape": [3, 5]}]
    np.testing.assert_array_equal(read(out, A @ B), A @ B)


def test_the_clients_own_shared_memory(client: triton.InferenceServerClient) -> None:
    key = f"/{PREFIX}{os.getpid()}-own"
    handle = shm.create_shared_memory_region("own", key, A.nbytes + B.nbytes + 60)
    try:
        shm.set_shared_memory_region(handle, [A, B])
        client.register_system_shared_memory("own", key, A.nbytes + B.nbytes + 60)
        inputs = [given("a", A, "own"), given("b", B, "own", A.nbytes)]
        infer(client, "matmul", inputs, wanted("own", 60, A.nbytes + B.nbytes))
        got = shm.get_contents_as_numpy(handle, np.float32, [3, 5], A.nbytes + B.nbytes)
        np.testing.assert_array_equal(got, A @ B)
        (status,) = client.get_system_shared_memory_status("own")
        assert status == {"name": "own", "key": key, "offset": 0, "byte_size": A.nbytes + B.nbytes + 60}
        client.unregister_system_shared_memory("own")
        assert client.get_system_shared_memory_status() == []
        del got
    finally:
        shm.destroy_shared_memory_region(handle)


def test_inputs_alone_and_beside_others(regions: Regions) -> None:
    regions.add("in", A.tobytes())
    for b in (given("b", B), triton.InferInput("b", [4, 5], "FP32").set_data_from_numpy(B, binary_data=False)):
        result = infer(regions.client, "matmul", [given("a", A, "in"), b])
        np.testing.assert_array_equal(result.as_numpy("out"), A @ B)
    text = triton.InferRequestedOutput("out", binary_data=False)
    result = infer(regions.client, "softmax", [given("x", np.zeros((3, 4), np.float32), "in")], text)
    np.testing.assert_allclose(result.as_numpy("out").sum(-1), 1, rtol=1e-6)


def test_a_result_alone(regions: Regions) -> None:
    out = regions.add("out", b"\xff" * 100)
    infer(regions.client, "matmul", [given("a", A), given("b", B)], wanted("out", 80, 13))
    np.testing.assert_array_equal(read(out, A @ B, 13), A @ B)
    assert (out.read_bytes()[:13], out.read_bytes()[73:]) == (b"\xff" * 13, b"\xff" * 27)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.int8])
@pytest.mark.parametrize("offset", [0, 1, 7, 64, 4095])
def test_any_dtype_at_any_offset(regions: Regions, dtype: type, offset: int) -> None:
    a: Array = np.arange(-6, 6).reshape(3, 4).astype(dtype)
    b: Array = np.arange(-4, 4).reshape(4, 2).astype(dtype)
    expected: Array = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.int32 if dtype is np.int8 else dtype)
    path = regions.add("r", bytes(5 + offset) + a.tobytes() + b.tobytes() + bytes(expected.nbytes), 5)
    place = offset + a.nbytes + b.nbytes
    inputs = [given("a", a, "r", offset), given("b", b, "r", offset + a.nbytes)]
    infer(regions.client, "matmul", inputs, wanted("r", expected.nbytes, place))
    np.testing.assert_array_equal(read(path, expected, 5 + place), expected)


def test_in_place(regions: Regions) -> None:
    path = regions.add("r", A.tobytes())
    for power in range(1, 6):
        infer(regions.client, "add", [given("a", A, "r"), given("b", A, "r")], wanted("r", A.nbytes))
        np.testing.assert_array_equal(read(path, A), A * 2**power)


def test_two_regions_of_one_object(regions: Regions) -> None:
    path = regions.add("whole", A.tobytes() * 2)
    regions.client.register_system_shared_memory("half", path.name, A.nbytes, A.nbytes)
    infer(regions.client, "add", [given("a", A, "whole"), given("b", A, "half")], wanted("half", A.nbytes))
    np.testing.assert_array_equal(read(path, A, A.nbytes), A * 2)
    np.testing.assert_array_equal(read(path, A), A)


def test_a_resident_weight_and_a_region(sharing: LiveServer, regions: Regions) -> None:
    with sharing.client() as http:
        assert http.put("/v1/tensors/shm/w", content=to_npy(B)).status_code in (200, 201)
        out = regions.add("r", A.tobytes() + bytes(60))
        parameters = {"shared_memory_region": "r", "shared_memory_byte_size": A.nbytes}
        room = {"shared_memory_region": "r", "shared_memory_byte_size": 60, "shared_memory_offset": A.nbytes}
        request = {
            "inputs": [
                {"name": "a", "datatype": "FP32", "shape": [3, 4], "parameters": parameters},
                {"name": "b", "datatype": "FP32", "shape": [4, 5], "parameters": {"resident": "shm/w"}},
            ],
            "outputs": [{"name": "out", "parameters": room}],
        }
        answer = http.post("/v2/models/matmul/infer", json=request)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"] == [{"name": "out", "datatype": "FP32", "shape": [3, 5]}]
        assert http.delete("/v1/tensors/shm/w").status_code == 204
    np.testing.assert_array_equal(read(out, A @ B, A.nbytes), A @ B)


def test_nothing_of_nothing(regions: Regions) -> None:
    regions.add("r", 16)
    empty: Array = np.zeros((0, 4), np.float32)
    result = infer(regions.client, "add", [given("a", empty, "r", 16), given("b", empty, "r")], wanted("r", 0, 16))
    assert result.get_response()["outputs"][0]["shape"] == [0, 4]
    inner: Array = np.zeros((2, 0), np.float32)
    out = regions.add("out", b"\xff" * 16)
    infer(regions.client, "matmul", [given("a", inner, "r"), given("b", inner.T, "r")], wanted("out", 16))
    assert out.read_bytes() == bytes(16)


def test_what_is_wrong_with_sizes_is_400(regions: Regions) -> None:
    out = regions.add("r", A.tobytes())
    for size in (A.nbytes - 1, A.nbytes + 1, 0, 2**63 - 1):
        wrong = triton.InferInput("x", [3, 4], "FP32").set_shared_memory("r", size)
        with refused(400, "shared_memory_byte_size"):
            infer(regions.client, "softmax", [wrong])
    for room in (0, A.nbytes - 1):
        with refused(400, "shared_memory_byte_size"):
            infer(regions.client, "softmax", [given("x", A)], wanted("r", room))
    assert out.read_bytes() == A.tobytes()


@pytest.mark.parametrize(
    "offset", [1, 48, 2**31, 2**32 - 47, 2**63 - 48, 2**63 - 1, 2**64 - 47, 2**64 - 1, 2**64, 2**100]
)
def test_an_offset_that_wraps_is_400(regions: Regions, offset: int) -> None:
    regions.add("r", A.tobytes())
    with refused(400, "x"):
        infer(regions.client, "softmax", [given("x", A, "r", offset)])
    with refused(400, "out"):
        infer(regions.client, "softmax", [given("x", A)], wanted("r", A.nbytes, offset))


def test_a_region_ends_where_it_was_said_to(regions: Regions) -> None:
    path = regions.add("whole", 4096)
    regions.client.register_system_shared_memory("part", path.name, 100, 1000)
    infer(regions.client, "softmax", [given("x", A, "part", 52)])
    for offset in (53, 100, 2000):
        with refused(400, "do not lie inside"):
            infer(regions.client, "softmax", [given("x", A, "part", offset)])


def test_an_unknown_region_is_404(sharing: LiveServer, regions: Regions) -> None:
    regions.add("r", A.tobytes())
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 4], "parameters": {}}]}
    request["inputs"][0]["parameters"] = {"shared_memory_region": "none", "shared_memory_byte_size": 48}
    with sharing.client() as http:
        answer = http.post("/v2/models/softmax/infer", json=request)
        assert answer.status_code == 404
        assert "'none'" in answer.json()["error"]
        assert http.get("/v2").json()["extensions"][-1] == "system_shared_memory"
    with refused(404, "'none'"):
        infer(regions.client, "add", [given("a", A, "r"), given("b", A, "r")], wanted("none", 48))


def test_an_object_that_may_only_be_read(regions: Regions) -> None:
    path = regions.add("w", A.tobytes())
    path.chmod(0o444)
    regions.client.register_system_shared_memory("ro", path.name, A.nbytes)
    result = infer(regions.client, "add", [given("a", A, "ro"), given("b", A)])
    np.testing.assert_array_equal(result.as_numpy("out"), A * 2)
    with refused(400, "read-only"):
        infer(regions.client, "add", [given("a", A, "ro"), given("b", A)], wanted("ro", A.nbytes))
    assert path.read_bytes() == A.tobytes()


def test_an_object_that_was_cut_is_400_and_harms_nobody(sharing: LiveServer, regions: Regions) -> None:
    engines = sharing.engines()
    path = regions.add("r", 3 * 4096)
    for size in (4096 + 47, 4095, 1, 0):
        os.truncate(path, size)
        with refused(400, "was cut"):
            infer(regions.client, "softmax", [given("x", A, "r", 4096)])
        with refused(400, "was cut"):
            infer(regions.client, "softmax", [given("x", A)], wanted("r", A.nbytes, 4096))
        assert path.stat().st_size == size
    os.truncate(path, 3 * 4096)
    infer(regions.client, "softmax", [given("x", A, "r", 4096)], wanted("r", A.nbytes, 8192))
    assert sharing.engines() == engines


def test_an_object_that_is_cut_all_the_time_ends_no_engine(sharing: LiveServer, regions: Regions) -> None:
    engines = sharing.engines()
    big: Array = np.ones((256, 1024), np.float32)
    path = regions.add("r", big.tobytes())
    done = threading.Event()

    def cut() -> None:
        while not done.is_set():
            os.truncate(path, 0)
            os.truncate(path, big.nbytes)

    thread = threading.Thread(target=cut)
    thread.start()
    outcomes = set()
    try:
        for _ in range(60):
            try:
                infer(regions.client, "add", [given("a", big, "r"), given("b", big, "r")], wanted("r", big.nbytes))
                outcomes.add("200")
            except InferenceServerException as error:
                outcomes.add(f"{error.status()} {'cut' if 'cut' in error.message() else error.message()}")
    finally:
        done.set()
        thread.join()
    assert outcomes <= {"200", "400 cut"}
    assert sharing.engines() == engines


def test_a_name_means_what_was_registered_last(regions: Regions) -> None:
    for value in range(1, 6):
        array = np.full((2, 2), value, np.float32)
        out = regions.add("r", array.tobytes())
        infer(regions.client, "add", [given("a", array, "r"), given("b", array, "r")], wanted("r", array.nbytes))
        np.testing.assert_array_equal(read(out, array), array * 2)
        regions.client.unregister_system_shared_memory("r")
        with refused(404, "'r'"):
            infer(regions.client, "add", [given("a", array, "r"), given("b", array)])


def test_an_object_without_its_name_stays_registered(regions: Regions) -> None:
    path = regions.add("r", A.tobytes())
    with path.open("rb") as still:
        path.unlink()
        infer(regions.client, "add", [given("a", A, "r"), given("b", A)], wanted("r", A.nbytes))
        np.testing.assert_array_equal(np.frombuffer(still.read(), np.float32).reshape(3, 4), A * 2)


def test_unregistered_while_in_use(sharing: LiveServer, regions: Regions) -> None:
    """Registrations come and go under requests: each request finishes with the memory that it found, or finds none."""
    array: Array = np.ones((64, 1024), np.float32)
    paths = [regions.add(f"r{number}", array.tobytes() + bytes(array.nbytes)) for number in range(2)]
    done = threading.Event()

    def churn() -> None:
        with connected(sharing) as own:
            while not done.is_set():
                for number, path in enumerate(paths):
                    own.unregister_system_shared_memory(f"r{number}")
                    own.register_system_shared_memory(f"r{number}", path.name, 2 * array.nbytes)

    thread = threading.Thread(target=churn)
    thread.start()
    outcomes: dict[str, int] = {}
    try:
        for number in range(80):
            name = f"r{number % 2}"
            inputs = [given("a", array, name), given("b", array, name)]
            try:
                infer(regions.client, "add", inputs, wanted(name, array.nbytes, array.nbytes))
                np.testing.assert_array_equal(read(paths[number % 2], array, array.nbytes), array * 2)
                outcome = "200"
            except InferenceServerException as error:
                outcome = error.status() or ""
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    finally:
        done.set()
        thread.join()
    assert outcomes.keys() <= {"200", "404"}
    assert outcomes["200"]


@pytest.mark.parametrize("model", ["matmul", "softmax", "add"])
def test_many_clients_and_batches_do_not_mix(sharing: LiveServer, regions: Regions, model: str) -> None:
    def one(number: int) -> bool:
        array: Array = np.full((8, 32), 1 + number % 7, np.float32)
        square: Array = np.eye(32, dtype=np.float32) * (2 + number)
        expected = {"matmul": array @ square, "softmax": np.full((8, 32), 1 / 32, np.float32), "add": array * 2}[model]
        with shared_object(array.tobytes() + square.tobytes() + bytes(expected.nbytes)) as path:
            name, place = f"{model}-{number}", array.nbytes + square.nbytes
            with triton.InferenceServerClient(sharing.url.removeprefix("http://")) as own:
                own.register_system_shared_memory(name, path.name, path.stat().st_size)
                is_right = True
                for _ in range(6):
                    inputs = {
                        "matmul": [given("a", array, name), given("b", square, name, array.nbytes)],
                        "softmax": [given("x", array, name)],
                        "add": [given("a", array, name), given("b", array)],
                    }[model]
                    infer(own, model, inputs, wanted(name, expected.nbytes, place))
                    is_right &= np.array_equal(read(path, expected, place), expected)
                own.unregister_system_shared_memory(name)
        return is_right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(24)))


def test_nothing_is_left(sharing: LiveServer, regions: Regions) -> None:
    """Descriptors, mappings and slots are back where they were, whatever was asked."""
    pids = [sharing.process.pid, *sharing.engines(), *sharing.gateways()]

    def round_of_requests() -> None:
        with shared_object(A.tobytes() + bytes(48)) as path:
            regions.client.register_system_shared_memory("r", path.name, 96)
            infer(regions.client, "softmax", [given("x", A, "r")], wanted("r", 48, 48))
            for offset in (60, 96):
                with pytest.raises(InferenceServerException):
                    infer(regions.client, "softmax", [given("x", A, "r", offset)])
                with pytest.raises(InferenceServerException):
                    infer(regions.client, "softmax", [given("x", A, "r")], wanted("r", 48, offset))
            with pytest.raises(InferenceServerException):
                regions.client.register_system_shared_memory("r", path.name, 96)
            regions.client.unregister_system_shared_memory("r")

    round_of_requests()
    before = {pid: held_by(pid) for pid in pids}
    for _ in range(30):
        round_of_requests()
    end_s = time.monotonic() + PATIENCE_S
    while (after := {pid: held_by(pid) for pid in pids}) != before and time.monotonic() < end_s:
        time.sleep(0.05)
    assert after == before
    with sharing.client() as http:
        assert settles(http, is_idle)


def held_by(pid: int) -> tuple[int, int]:
    """Descriptors of shared-memory objects, and mappings of them."""
    targets = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(link.readlink()))
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sum(PREFIX in target for target in targets), maps.count(PREFIX)


def test_a_gateway_dies_and_the_regions_stay(sharing: LiveServer, regions: Regions) -> None:
    path = regions.add("r", A.tobytes())
    victim = sharing.gateways()[0]
    os.kill(victim, signal.SIGKILL)
    end_s = time.monotonic() + PATIENCE_S
    while len(sharing.gateways()) < 2 or victim in sharing.gateways():
        assert time.monotonic() < end_s
        time.sleep(0.02)
    for pid in sharing.gateways():
        sharing.wait_ready(pid)
    with connected(sharing) as own:
        infer(own, "add", [given("a", A, "r"), given("b", A)], wanted("r", A.nbytes))
    np.testing.assert_array_equal(read(path, A), A * 2)


def test_an_engine_dies_and_the_regions_come_back(start_server: StartServer) -> None:
    server = start_server("--gateways", "2", "--arena-bytes", "32MiB", "--allow-shared-memory")
    with connected(server) as client, contextlib.ExitStack() as stack:
        regions = Regions(client, stack)
        kept = regions.add("kept", A.tobytes())
        regions.add("gone", A.tobytes())
        client.unregister_system_shared_memory("gone")
        with kept.open("rb") as still:
            kept.unlink()
            for power in range(1, 4):
                (victim,) = server.engines()
                os.kill(victim, signal.SIGKILL)
                until_ready(server, {victim})
                assert [one["name"] for one in client.get_system_shared_memory_status()] == ["kept"]
                infer(client, "add", [given("a", A, "kept"), given("b", A, "kept")], wanted("kept", A.nbytes))
                still.seek(0)
                np.testing.assert_array_equal(np.frombuffer(still.read(), np.float32).reshape(3, 4), A * 2**power)
        client.unregister_system_shared_memory("kept")
        assert client.get_system_shared_memory_status() == []
        assert held_by(server.process.pid) == (0, 0)


def test_several_engines_have_the_same_regions(start_server: StartServer) -> None:
    server = start_server("--device", "cpu:0,1", "--gateways", "2", "--arena-bytes", "32MiB", "--allow-shared-memory")
    with connected(server) as client, contextlib.ExitStack() as stack:
        regions = Regions(client, stack)
        regions.add("r", A.tobytes() + bytes(48))

        def use(_number: int) -> None:
            with connected_without_end(server) as own:
                infer(own, "add", [given("a", A, "r"), given("b", A, "r")], wanted("r", A.nbytes, 48))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(use, range(40)))
        for victim in server.engines():
            os.kill(victim, signal.SIGKILL)
            until_ready(server, {victim}, num_engines=2)
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(use, range(20)))
        client.unregister_system_shared_memory("r")
        for _ in range(10):
            with refused(404, "'r'"):
                infer(client, "softmax", [given("x", A, "r")])
        assert {held_by(pid) for pid in server.engines()} == {(0, 0)}


@contextlib.contextmanager
def connected_without_end(server: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


def until_ready(server: LiveServer, gone: set[int], num_engines: int = 1) -> None:
    """Returns when new engines serve every gateway."""
    end_s = time.monotonic() + PATIENCE_S
    while gone & set(server.engines()) or len(server.engines()) < num_engines:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    for pid in server.gateways():
        while len(engines_of(server, pid)) < num_engines:
            assert time.monotonic() < end_s
            time.sleep(0.02)


def engines_of(server: LiveServer, gateway: int) -> list[object]:
    with server.connect_to(gateway) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nhost: tests\r\nconnection: close\r\n\r\n")
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    found: list[object] = json.loads(answer.partition(b"\r\n\r\n")[2])["engines"]
    return found


def test_without_the_flag_no_region_is_named(server: LiveServer) -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 48}
    tensor = {"name": "x", "datatype": "FP32", "shape": [3, 4]}
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for request in (
            {"inputs": [{**tensor, "parameters": parameters}]},
            {"inputs": [{**tensor, "data": [0] * 12}], "outputs": [{"name": "out", "parameters": parameters}]},
        ):
            answer = http.post("/v2/models/softmax/infer", json=request)
            assert answer.status_code == 400
            assert "--allow-shared-memory" in answer.json()["error"]
        assert "system_shared_memory" not in http.get("/v2").json()["extensions"]
