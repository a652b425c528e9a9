"""Where residents lie on a machine with two devices, and what the death of one of them makes unavailable."""

from __future__ import annotations

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
from tests.support.exposition import Scrape, scrape, settles, total
from tests.support.live_server import LiveServer
from tests.support.problems import check_problem
from tests.support.tensor_bodies import TYPES, decode, from_safetensors, to_npy, to_safetensors
from tilewire.service.ipc.board import home_of

TIMEOUT_S = 30.0
NUM_SENDERS = 24
X = np.arange(8, dtype=np.float32).reshape(2, 4)
FLAGS = ("--device", "cpu:0,1", "--gateways", "2", "--arena-bytes", "64MiB", "--no-spare-engine")


def weight(number: int) -> np.ndarray:
    return np.full((4, 3), number, np.float32)


def homed(home: int, count: int) -> list[str]:
    """Names whose changes one of two engines orders."""
    names = (f"w{number}" for number in range(1000))
    return [name for name in names if home_of(name, 2) == home][:count]


@pytest.fixture
def server(shared_server: StartServer) -> LiveServer:
    return shared_server(*FLAGS, "--resident-bytes", "64KiB")


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
        for one in client.get("/v1/tensors").json():
            client.delete(f"/v1/tensors/{one['name']}")
        assert settles(client, lambda now: total(now, "tilewire_resident_tensors") == 0)


def put(client: httpx.Client, name: str, array: np.ndarray, placement: str = "") -> None:
    query = f"?placement={placement}" if placement else ""
    response = client.put(f"/v1/tensors/{name}{query}", content=to_npy(array))
    assert response.status_code in (200, 201), response.text


def multiply(client: httpx.Client, name: str) -> httpx.Response:
    return client.post(f"/v1/matmul?b=@{name}", content=to_safetensors({"a": X}))


def check_product(client: httpx.Client, name: str, array: np.ndarray, a: np.ndarray = X) -> None:
    response = client.post(f"/v1/matmul?b=@{name}", content=to_safetensors({"a": a}))
    assert response.status_code == 200, response.text
    np.testing.assert_array_equal(decode(TYPES["safetensors"], response.content), a @ array)


def places(client: httpx.Client) -> dict[str, tuple[str, list[int]]]:
    return {one["name"]: (one["placement"], one["engines"]) for one in client.get("/v1/tensors").json()}


def ready_devices(client: httpx.Client) -> set[str]:
    return {engine["device"] for engine in client.get("/v2").json()["engines"]}


def kill_one(server: LiveServer, client: httpx.Client) -> int:
    """Kills an engine; returns its index as soon as the gateway has seen it go."""
    os.kill(min(server.engines()), signal.SIGKILL)
    end_s = time.monotonic() + TIMEOUT_S
    while len(ready := ready_devices(client)) != 1:
        assert time.monotonic() < end_s, ready
    return {"cpu:0": 1, "cpu:1": 0}[ready.pop()]


@pytest.mark.slow
def test_a_single_tensor_takes_room_on_one_device(client: httpx.Client) -> None:
    names = [*homed(0, 3), *homed(1, 3)]
    for number, name in enumerate(names):
        put(client, name, weight(number), "single")
    for number, name in enumerate(names):
        check_product(client, name, weight(number))
        got = client.get(f"/v1/tensors/{name}", headers={"accept": TYPES["npy"]})
        np.testing.assert_array_equal(decode(TYPES["npy"], got.content), weight(number))
        assert places(client)[name] == ("single", [home_of(name, 2)])
    assert settles(client, lambda now: total(now, "tilewire_resident_tensors") == len(names))
    put(client, names[0], weight(7), "replicate")
    assert settles(client, lambda now: total(now, "tilewire_resident_tensors") == len(names) + 1)
    assert places(client)[names[0]] == ("replicate", [0, 1])
    put(client, names[0], weight(8), "single")
    check_product(client, names[0], weight(8))
    assert settles(client, lambda now: total(now, "tilewire_resident_tensors") == len(names))
    for name in names:
        assert client.delete(f"/v1/tensors/{name}").status_code == 204
        assert multiply(client, name).status_code == 404
    assert settles(client, lambda now: total(now, "tilewire_resident_bytes") == 0)


def test_auto_goes_by_the_size_and_room_is_looked_for(client: httpx.Client) -> None:
    small, large = np.ones((4, 256), np.float32), np.ones((4, 2560), np.float32)
    put(client, "small", small)
    put(client, "large", large, "auto")
    assert places(client)["small"][0] == "replicate"
    assert places(client)["large"] == ("single", [home_of("large", 2)])
    # 40 KiB each: the second of a home goes to the other device, and no device has room for a third.
    name = next(name for name in homed(home_of("large", 2), 20))
    put(client, name, large)
    assert places(client)[name] == ("single", [1 - home_of("large", 2)])
    for one in ("large", name):
        check_product(client, one, large)
    expected = {"single": large.nbytes, "replicate": small.nbytes, "shard": 0}

    def placed(now: Scrape) -> list[dict[str, float]]:
        gauge = "tilewire_resident_placement_bytes"
        return [{of: total(now, gauge, device=f"cpu:{index}", placement=of) for of in expected} for index in range(2)]

    assert settles(client, lambda now: placed(now) == [expected, expected])
    check_problem(client.put("/v1/tensors/more", content=to_npy(large)), 507, "more")
    check_problem(client.put("/v1/tensors/x?placement=here", content=to_npy(small)), 400, "placement")


def test_residents_of_two_devices_meet_on_one(client: httpx.Client) -> None:
    (one,), (two,) = homed(0, 1), homed(1, 1)
    a, b = np.ones((32, 64), np.float32), np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    put(client, one, a, "single")
    put(client, two, b, "single")
    for _ in range(3):
        response = client.post(f"/v1/matmul?a=@{one}&b=@{two}", headers={"accept": TYPES["npy"]})
        assert response.status_code == 200, response.text
        np.testing.assert_array_equal(decode(TYPES["npy"], response.content), a @ b)
    # The larger one stayed, the other has a second copy now.
    assert places(client) == {one: ("single", [0]), two: ("single", [0, 1])}
    # Which gives way when its room is needed. The home engine has acknowledged the other; this one follows.
    put(client, "filler", np.ones((14, 1024), np.float32), "replicate")
    assert settles(client, lambda _: places(client)[two] == ("single", [1]))


def test_a_queue_that_lasts_brings_a_copy_to_the_idle_device(server: LiveServer, client: httpx.Client) -> None:
    """Searches take an engine longer than their bytes take a client."""
    (name,) = homed(0, 1)
    rng = np.random.default_rng(1)
    queries, items = (rng.integers(-9, 10, (rows, 16)).astype(np.float32) for rows in (2048, 900))
    put(client, name, items, "single")
    assert places(client)[name] == ("single", [0])
    body, expected = to_safetensors({"a": queries}), (queries @ items.T).argmax(1, keepdims=True)
    ending = threading.Event()

    def ask(sender: httpx.Client) -> None:
        answer = sender.post(f"/v1/search?b=@{name}&k=1&metric=dot", content=body)
        assert answer.status_code == 200, answer.text
        np.testing.assert_array_equal(from_safetensors(answer.content)["indices"], expected)

    def keep_asking() -> None:
        with server.client() as sender:
            while not ending.is_set():
                ask(sender)

    with ThreadPoolExecutor(NUM_SENDERS) as senders:
        asking = [senders.submit(keep_asking) for _ in range(NUM_SENDERS)]
        try:
            end_s = time.monotonic() + TIMEOUT_S
            while places(client)[name] != ("single", [0, 1]):
                assert time.monotonic() < end_s
                time.sleep(0.1)
        finally:
            ending.set()
        for one in asking:
            one.result()
    for _ in range(4):
        ask(client)


def test_a_stored_result_is_where_it_was_made_and_then_everywhere(client: httpx.Client) -> None:
    for number in range(8):
        body = to_safetensors({"a": X, "b": weight(number)})
        stored = client.post(f"/v1/matmul?store=@y{number}&durable=true", content=body)
        assert stored.status_code == 201, stored.text
        assert stored.json()["placement"] == "replicate"
        assert len(stored.json()["engines"]) == 1
        response = client.post(f"/v1/softmax?x=@y{number}")
        assert response.status_code == 200, response.text
    end_s = time.monotonic() + TIMEOUT_S
    while {tuple(engines) for _, engines in places(client).values()} != {(0, 1)}:
        assert time.monotonic() < end_s, places(client)


@pytest.mark.slow
def test_only_what_a_dead_engine_alone_holds_is_unavailable(server: LiveServer, client: httpx.Client) -> None:
    names = [*homed(0, 2), *homed(1, 2)]
    for number, name in enumerate(names):
        put(client, name, weight(number), "single")
    put(client, "everywhere", weight(9), "replicate")
    assert settles(client, lambda now: total(now, "tilewire_resident_tensors") == len(names) + 2)
    dead = kill_one(server, client)
    seen = {name: multiply(client, name) for name in names}
    for number, name in enumerate(names):
        if home_of(name, 2) != dead:
            check_product(client, name, weight(number))
        elif seen[name].status_code == 503:
            assert "retry-after" in seen[name].headers
    assert {seen[name].status_code for name in names if home_of(name, 2) == dead} <= {503, 200}
    check_product(client, "everywhere", weight(9))
    # Uploads to the other go on.
    put(client, homed(1 - dead, 3)[2], weight(5), "single")
    assert set(places(client)) == {*names, "everywhere", homed(1 - dead, 3)[2]}
    end_s = time.monotonic() + TIMEOUT_S
    while len(ready_devices(client)) < 2:
        assert time.monotonic() < end_s
    for number, name in enumerate(names):
        check_product(client, name, weight(number))
    assert total(scrape(client), "tilewire_engine_restarts_total") == 1
