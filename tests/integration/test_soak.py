"""A short soak with kills, and that a soak sees what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import soak_calls
from benchmarks.soak import FLAGS, is_good, soak, soaked_server, text_of
from benchmarks.soak_clients import Honest, Tally
from benchmarks.soak_watch import Killer, Life
from tests.conftest import StartServer
from tests.support.live_server import LiveServer
from tests.support.raw_http import Answer
from tests.support.tensor_bodies import encode

SECONDS, KILL_EVERY_S = 25.0, 6.0


@pytest.mark.slow
@pytest.mark.parametrize("is_secure", [False, True])
def test_nothing_is_wrong_or_unexplained(tmp_path: Path, is_secure: bool) -> None:
    with soaked_server(tmp_path, is_secure=is_secure) as server:
        report = soak(server, SECONDS, KILL_EVERY_S, seed=3, min_outages=2)
    assert is_good(report), text_of(report)
    outages, counts, by_call = report["outages"], report["counts"], report["right_by_call"]
    assert isinstance(outages, list)
    assert isinstance(counts, dict)
    assert isinstance(by_call, dict)
    assert {outage["role"] for outage in outages} == {"engine", "gateway"}
    assert counts["right"] > 100
    assert counts["leaver: left"] > 0
    assert any(name.startswith("hostile: 4") for name in counts)
    assert ("hostile: 401" in counts) == is_secure
    # Every entry was drawn, and its answers were right.
    names = {maker(np.random.default_rng(1)).name for maker in soak_calls.CALLS}
    assert names | {"put", "store", "store durable", "get"} <= set(by_call)


@pytest.fixture(scope="module")
def soakable(shared_server: StartServer) -> LiveServer:
    """A server that has what the calls name."""
    server = shared_server(*FLAGS)
    with server.client() as client:
        soak_calls.upload(client)
    return server


@pytest.mark.parametrize("maker", soak_calls.CALLS, ids=lambda maker: maker.__name__)
def test_a_call_is_answered_as_it_expects(soakable: LiveServer, maker: soak_calls.Maker) -> None:
    honest = Honest(soakable, Killer(soakable, 60), Tally(), 1)
    for seed in range(3):
        call = maker(np.random.default_rng(seed))
        with honest.connect() as connection:
            connection.send(call.data)
            answer = connection.answer()
        assert (answer.status, call.check(answer)) == (call.status, True), answer


def test_a_wrong_product_is_seen() -> None:
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    body, headers = encode("safetensors", {"out": expected + np.eye(2, 3, dtype=np.float32)})
    assert not soak_calls.equals(expected)(Answer(200, headers, body))
    body, headers = encode("safetensors", {"out": expected})
    assert soak_calls.equals(expected)(Answer(200, headers, body))


def name_of(call: soak_calls.Call) -> str:
    """The tensor that a call reads or writes."""
    found = re.search(rb"soak/client-\d+/\d+", call.data)
    assert found is not None
    return found[0].decode()


def test_a_lost_write_is_seen() -> None:
    residents, rng = soak_calls.Residents(1), np.random.default_rng(0)
    residents.NUM_NAMES = 1
    value = 0
    for number in range(1, 21):
        put, ended = residents.write(rng)
        ended(True)
        name = name_of(put)
        get = residents.read(rng)
        if name_of(get) != name:
            continue
        value = 10**6 + number
        body, headers = encode("npy", {"x": np.full((4, 4), value, np.int64)})
        assert get.check(Answer(200, headers, body))
        body, headers = encode("npy", {"x": np.full((4, 4), value - 1, np.int64)})
        assert not get.check(Answer(200, headers, body))
    assert value


def test_a_write_without_an_answer_leaves_two_values() -> None:
    residents, rng = soak_calls.Residents(2), np.random.default_rng(0)
    put, ended = residents.write(rng)
    ended(False)
    name = name_of(put)
    gets = [get for get in (residents.read(rng) for _ in range(30)) if name_of(get) == name]
    assert gets
    assert {(get.status, get.or_statuses - {410}) for get in gets} == {(200, frozenset({404}))}


def test_a_slope_is_found() -> None:
    life = Life("gateway", [(float(second), 10**8 + second * 10**5, 30) for second in range(300)])
    assert life.slope(1) == pytest.approx(6e6)
    assert life.summary()["mb_per_min"] == pytest.approx(6.0)
    assert life.summary()["descriptors_per_min"] == pytest.approx(0.0, abs=1e-6)
