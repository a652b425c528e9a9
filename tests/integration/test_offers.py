"""Clients that offer HTTP/2 with every request, as Java's does: they are answered in HTTP/1.1, their bodies read in full."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest

from tests.support.exposition import is_idle, scrape, settles, total
from tests.support.raw_http import RawConnection, head, post
from tests.support.tensor_bodies import TYPES, Array, decode, to_npy, to_safetensors

OFFER = {
    "connection": "Upgrade, HTTP2-Settings",
    "upgrade": "h2c",
    "http2_settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
}
WEBSOCKET = {"connection": "Upgrade", "upgrade": "websocket", "sec_websocket_version": "13"}
SIZES = {"small": 4, "longer than one read": 300, "read directly": 700}
numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(client: httpx.Client) -> Iterator[None]:
    yield
    assert settles(client, is_idle), scrape(client)


@pytest.fixture
def connection(raw: Callable[[], RawConnection]) -> RawConnection:
    return raw()


def pair(size: int) -> tuple[bytes, Array]:
    """A body, and the sum that it asks for: another one each time."""
    number = next(numbers)
    a, b = np.full((size, size), number, np.float32), np.ones((size, size), np.float32)
    return to_safetensors({"a": a, "b": b}), a + b


def check_sum(connection: RawConnection, expected: Array) -> None:
    answer = connection.answer()
    assert answer.status == 200, answer
    assert "upgrade" not in answer.headers
    np.testing.assert_array_equal(decode(TYPES["safetensors"], answer.body), expected)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_requests_with_an_offer_are_answered_one_after_another(connection: RawConnection, size: int) -> None:
    for _ in range(4):
        body, expected = pair(size)
        connection.send(post("/v1/add", body, **OFFER))
        check_sum(connection, expected)
        body, expected = pair(size)
        connection.send(post("/v1/add", body))
        check_sum(connection, expected)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_head_with_an_offer_may_come_before_its_body(connection: RawConnection, size: int) -> None:
    for cut in (0, 1, 100):
        body, expected = pair(size)
        whole = post("/v1/add", body, **OFFER)
        at = len(whole) - len(body) + cut
        connection.send(whole[:at])
        time.sleep(0.05)
        connection.send(whole[at:])
        check_sum(connection, expected)


def test_a_client_that_waits_to_be_told_to_send_its_body(connection: RawConnection) -> None:
    """As `curl --http2` does with a large body."""
    for size in SIZES.values():
        body, expected = pair(size)
        connection.send(head("POST", "/v1/add", content_length=str(len(body)), expect="100-continue", **OFFER))
        assert connection.answer().status == 100
        connection.send(body)
        check_sum(connection, expected)


def test_chunks_behind_an_offer_are_read(connection: RawConnection) -> None:
    for _ in range(2):
        body, expected = pair(20)
        pieces = [body[:7], body[7:1000], body[1000:]]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        connection.send(head("POST", "/v1/add", transfer_encoding="chunked", **OFFER) + chunks + b"0\r\n\r\n")
        check_sum(connection, expected)


@pytest.mark.parametrize("seed", range(6))
def test_any_cut_of_pipelined_requests_with_and_without_offers(connection: RawConnection, seed: int) -> None:
    rng = random.Random(seed)
    stream = b""
    expected: list[Array | None] = []
    for _ in range(30):
        if rng.random() < 0.3:
            stream += head("GET", "/healthz", content_length="0", **OFFER)
            expected.append(None)
        else:
            body, result = pair(rng.choice((1, 5, 60)))
            stream += post("/v1/add", body, **(OFFER if rng.random() < 0.6 else {}))
            expected.append(result)
    while stream:
        nbytes = rng.choice((1, 40, 700, 70_000))
        connection.send(stream[:nbytes])
        stream = stream[nbytes:]
    for wanted in expected:
        if wanted is None:
            assert connection.answer().status == 200
        else:
            check_sum(connection, wanted)


def test_an_offer_gives_nobody_the_bytes_of_others(client: httpx.Client, connection: RawConnection) -> None:
    """A body that does not come is not made up of what the slot held before."""
    body, _ = pair(50)
    for _ in range(5):
        assert client.post("/v1/add", content=body).status_code == 200
    connection.send(head("POST", "/v1/add", content_length=str(len(body)), **OFFER))
    assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
    time.sleep(0.2)
    connection.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.sock.recv(1)
    connection.sock.setblocking(True)
    other, expected = pair(50)
    connection.send(other)
    check_sum(connection, expected)


def test_an_offer_of_websocket_is_declined_too(connection: RawConnection) -> None:
    connection.send(head("GET", "/healthz", **WEBSOCKET))
    assert connection.answer().status == 200
    connection.send(post("/v1/add?b=@nothing", to_npy(np.ones(3)), **WEBSOCKET))
    assert connection.answer().status == 404
