"""Figures while gateways and engines are killed and replaced: counters never go back, gauges are right again."""

from __future__ import annotations

import os
import signal
import time

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.exposition import Scrape, scrape, settles, total
from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import to_safetensors

pytestmark = pytest.mark.slow

ONES = to_safetensors({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)})
ARENA_BYTES = 16 * 2**20
GAUGES = ("arena_bytes", "in_flight", "queue", "resident", "engine_up", "build_info")


def is_counter(name: str) -> bool:
    return not any(word in name for word in GAUGES)


def look(server: LiveServer) -> Scrape:
    """Over a connection of its own, and again when the gateway that took it was the one that was killed."""
    end_s = time.monotonic() + 20
    while True:
        try:
            with server.client() as client:
                return scrape(client)
        except httpx.TransportError:
            assert time.monotonic() < end_s


def post_some(server: LiveServer, count: int) -> int:
    """Sends requests; returns how many were answered 200."""
    answered = 0
    for _ in range(count):
        try:
            with server.client() as client:
                answered += client.post("/v1/matmul", content=ONES).status_code == 200
        except httpx.TransportError:
            continue
    return answered


def test_no_counter_goes_back_when_processes_are_replaced(start_server: StartServer) -> None:
    server = start_server("--gateways", "2", "--arena-bytes", str(ARENA_BYTES))
    assert post_some(server, 6) == 6
    with server.client() as client:
        assert settles(client, lambda now: total(now, "tilewire_requests_total", code="200") == 6)
    last = look(server)
    for victims in (server.gateways, server.engines):
        victim, *rest = victims()
        os.kill(victim, signal.SIGKILL)
        end_s = time.monotonic() + 60
        while True:
            post_some(server, 2)
            now = look(server)
            back = {sample: (value, now.get(sample)) for sample, value in last.items() if now.get(sample, -1) < value}
            assert not {sample: change for sample, change in back.items() if is_counter(sample[0])}
            last = now
            alive = victims()
            if len(alive) > len(rest) and victim not in alive and total(now, "tilewire_engine_up") == 1:
                break
            assert time.monotonic() < end_s
        for gateway in server.gateways():
            server.wait_ready(gateway)
    with server.client() as client:
        before = total(scrape(client), "tilewire_requests_total", code="200")
        answered = post_some(server, 4)
        assert settles(client, lambda now: total(now, "tilewire_requests_total", code="200") == before + answered)
        assert settles(client, lambda now: total(now, "tilewire_arena_bytes") == ARENA_BYTES)
        assert settles(client, lambda now: total(now, "tilewire_arena_bytes", state="used") == 0)
        assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 0)
        now = scrape(client)
    assert total(now, "tilewire_engine_restarts_total") == 1
    assert total(now, "tilewire_process_deaths_total", process="engine-0") == 1
    assert total(now, "tilewire_process_deaths_total", process="gateway-0") == 1
    assert now["tilewire_process_deaths_total", frozenset({("process", "gateway-1")})] == 0
    assert total(now, "tilewire_engine_up") == 1
    assert total(now, "tilewire_build_info") == 1


def test_a_gateway_that_dies_with_slots_leaves_none_behind(start_server: StartServer) -> None:
    server = start_server("--gateways", "2", "--arena-bytes", str(ARENA_BYTES))
    (victim, _other) = server.gateways()
    with server.connect_to(victim) as half_sent:
        half_sent.sendall(b"POST /v1/matmul HTTP/1.1\r\nhost: tests\r\ncontent-length: 4194304\r\n\r\n" + bytes(100))
        with server.client() as client:
            assert settles(client, lambda now: total(now, "tilewire_arena_bytes", state="used") >= 4194304)
            os.kill(victim, signal.SIGKILL)
    with server.client() as client:
        assert settles(client, lambda now: total(now, "tilewire_arena_bytes", state="used") == 0)
        assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 0)
        assert settles(client, lambda now: total(now, "tilewire_arena_bytes") == ARENA_BYTES)
