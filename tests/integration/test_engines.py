"""Several engines behind one address: residents on each, jobs on any, and one of them may die."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.exposition import scrape, settles, total
from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import TYPES, decode, to_npy, to_safetensors

TIMEOUT_S = 30.0
W = np.arange(12, dtype=np.float32).reshape(4, 3)
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def two_engines(shared_server: StartServer) -> LiveServer:
    return shared_server("--device", "cpu:0,1", "--gateways", "1", "--arena-bytes", "32MiB")


@pytest.fixture
def two(two_engines: LiveServer) -> Iterator[httpx.Client]:
    with two_engines.client() as client:
        yield client
        for one in client.get("/v1/tensors").json():
            client.delete(f"/v1/tensors/{one['name']}")


def engines_of(client: httpx.Client) -> list[str]:
    return sorted(engine["device"] for engine in client.get("/v2").json()["engines"])


def wait_for_engines(client: httpx.Client, devices: list[str]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while engines_of(client) != devices:
        assert time.monotonic() < end_s, engines_of(client)
        time.sleep(0.01)


def multiply(client: httpx.Client) -> None:
    response = client.post("/v1/matmul?b=@w", content=to_safetensors({"a": X}))
    assert response.status_code == 200, response.text
    np.testing.assert_array_equal(decode(TYPES["safetensors"], response.content), X @ W)


@pytest.mark.slow
def test_residents_are_on_every_engine_and_uses_add_up(two: httpx.Client) -> None:
    assert engines_of(two) == ["cpu:0", "cpu:1"]
    assert two.put("/v1/tensors/w", content=to_npy(W)).status_code == 201
    assert two.put("/v1/tensors/w", content=to_npy(W)).status_code == 200
    for _ in range(10):
        multiply(two)
    (info,) = two.get("/v1/tensors").json()
    assert info["hits"] == 10
    assert settles(two, lambda now: total(now, "tilewire_resident_tensors") == 2)
    stored = two.post("/v1/matmul?b=@w&store=@product", content=to_safetensors({"a": X}))
    assert stored.status_code == 201
    got = two.get("/v1/tensors/product", headers={"accept": TYPES["npy"]})
    np.testing.assert_array_equal(decode(TYPES["npy"], got.content), X @ W)
    assert two.delete("/v1/tensors/w").status_code == 204
    assert two.post("/v1/matmul?b=@w", content=to_safetensors({"a": X})).status_code == 404


@pytest.mark.slow
def test_one_engine_dies_and_the_other_serves(two_engines: LiveServer, two: httpx.Client) -> None:
    assert two.put("/v1/tensors/w", content=to_npy(W)).status_code == 201
    victim = min(two_engines.engines())
    os.kill(victim, signal.SIGKILL)
    end_s = time.monotonic() + TIMEOUT_S
    while len(alive := engines_of(two)) != 1:
        assert time.monotonic() < end_s, alive
    multiply(two)
    assert two.get("/readyz").status_code == 200
    # An upload would be missing on the engine that is down: it is refused, and nothing changes.
    refused = two.put("/v1/tensors/late", content=to_npy(W))
    assert refused.status_code in (201, 503)
    wait_for_engines(two, ["cpu:0", "cpu:1"])
    for _ in range(10):
        multiply(two)
    assert two.put("/v1/tensors/late", content=to_npy(W)).status_code in (200, 201)
    assert total(scrape(two), "tilewire_engine_restarts_total") == 1


NUM_WRITERS = 8
ROUNDS = 60


def body_of(value: float) -> bytes:
    return to_npy(np.full((4, 3), value, np.float32))


def change_at_once(writers: list[httpx.Client], number: int) -> None:
    """Every writer changes the one name at the same moment; some rounds have a deletion among the uploads."""
    together = threading.Barrier(len(writers))

    def change(index: int) -> int:
        together.wait()
        if number % 3 == 2 and index == 0:
            return writers[index].delete("/v1/tensors/w").status_code
        return writers[index].put("/v1/tensors/w", content=body_of(number * NUM_WRITERS + index)).status_code

    with ThreadPoolExecutor(len(writers)) as pool:
        assert set(pool.map(change, range(len(writers)))) <= {200, 201, 204, 404}


def read_from_both(readers: list[httpx.Client]) -> set[bytes]:
    """What requests at the same moment see of the name: two of them are on both engines."""
    together = threading.Barrier(len(readers))

    def read(reader: httpx.Client) -> list[bytes]:
        seen = []
        for _ in range(2):
            together.wait()
            response = reader.get("/v1/tensors/w")
            assert response.status_code in (200, 404), response.text
            seen.append(response.content if response.status_code == 200 else b"")
        return seen

    with ThreadPoolExecutor(len(readers)) as pool:
        return set().union(*pool.map(read, readers))


def replace_engine(server: LiveServer, index: int) -> None:
    """Kills an engine; returns when there is another process in its place."""
    victim = sorted(server.engines())[index]
    os.kill(victim, signal.SIGKILL)
    end_s = time.monotonic() + TIMEOUT_S
    while victim in (alive := server.engines()) or len(alive) < 2:
        assert time.monotonic() < end_s, alive
        time.sleep(0.01)


@pytest.mark.slow
def test_concurrent_writers_leave_one_tensor_on_all_engines(start_server: StartServer) -> None:
    server = start_server("--device", "cpu:0,1", "--gateways", "2", "--arena-bytes", "64MiB")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for _ in range(NUM_WRITERS)]
        for number in range(ROUNDS):
            change_at_once(clients, number)
            assert len(read_from_both(clients)) == 1, f"round {number}"
        assert clients[0].put("/v1/tensors/w", content=body_of(-1.0)).status_code in (200, 201)
        last = read_from_both(clients)
        # An engine that follows and one that decides: either comes back with the same tensor.
        for device in (1, 0):
            replace_engine(server, device)
            for client in clients:
                wait_for_engines(client, ["cpu:0", "cpu:1"])
            assert read_from_both(clients) == last
