"""Regions over time: many clients, objects that are cut, registrations that change, processes that die, and what is left."""

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

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.conftest import StartServer
from tests.support.exposition import is_idle, settles
from tests.support.live_server import LiveServer
from tests.support.shared_objects import PREFIX, shared_object
from tests.support.tensor_bodies import Array
from tests.support.triton_regions import A, Regions, connected, given, infer, read, refused, wanted

TIMEOUT_S = 30.0


@pytest.mark.slow
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


@pytest.mark.slow
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
    """No descriptor, mapping or slot is held, whatever was asked."""
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

    for _ in range(30):
        round_of_requests()
    let_go_of_all(pids)
    with sharing.client() as http:
        assert settles(http, is_idle)


def let_go_of_all(pids: Sequence[int]) -> None:
    """Waits until these processes hold no object; the supervisor hears of a region's end after the client."""
    nothing = dict.fromkeys(pids, (0, 0))
    end_s = time.monotonic() + TIMEOUT_S
    while (held := {pid: held_by(pid) for pid in pids}) != nothing and time.monotonic() < end_s:
        time.sleep(0.05)
    assert held == nothing


def held_by(pid: int) -> tuple[int, int]:
    """Descriptors of shared-memory objects, and mappings of them."""
    targets = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(link.readlink()))
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sum(PREFIX in target for target in targets), maps.count(PREFIX)


@pytest.mark.slow
def test_a_gateway_dies_and_the_regions_stay(sharing: LiveServer) -> None:
    with shared_object(A.tobytes()) as path:
        # Its connection may be the victim's.
        with connected_without_end(sharing) as own:
            own.register_system_shared_memory("r", f"/{path.name}", A.nbytes)
        victim = sharing.gateways()[0]
        os.kill(victim, signal.SIGKILL)
        end_s = time.monotonic() + TIMEOUT_S
        # In one look: of two, the first could be before its end, and the second behind.
        while victim in (alive := sharing.gateways()) or len(alive) < 2:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        for pid in sharing.gateways():
            sharing.wait_ready(pid)
        with connected(sharing) as own:
            infer(own, "add", [given("a", A, "r"), given("b", A)], wanted("r", A.nbytes))
        np.testing.assert_array_equal(read(path, A), A * 2)


@pytest.mark.slow
def test_an_engine_dies_and_the_regions_come_back(sharing: LiveServer) -> None:
    server = sharing
    with connected(server) as client, contextlib.ExitStack() as stack:
        regions = Regions(client, stack)
        kept = regions.add("kept", A.tobytes())
        regions.add("gone", A.tobytes())
        client.unregister_system_shared_memory("gone")
        with kept.open("rb") as still:
            kept.unlink()
            for power in range(1, 3):
                (victim,) = server.engines()
                os.kill(victim, signal.SIGKILL)
                until_ready(server, {victim})
                assert [one["name"] for one in client.get_system_shared_memory_status()] == ["kept"]
                infer(client, "add", [given("a", A, "kept"), given("b", A, "kept")], wanted("kept", A.nbytes))
                still.seek(0)
                np.testing.assert_array_equal(np.frombuffer(still.read(), np.float32).reshape(3, 4), A * 2**power)
        client.unregister_system_shared_memory("kept")
        assert client.get_system_shared_memory_status() == []
        let_go_of_all([server.process.pid])


@pytest.mark.slow
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
    end_s = time.monotonic() + TIMEOUT_S
    while gone & set(alive := server.engines()) or len(alive) < num_engines:
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
