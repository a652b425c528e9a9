"""Answers before the body: what becomes of the connection when the client waits, sends on, or ends its side."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from tests.support.raw_http import ConnectionEnded, RawConnection, head, post

MISSING = "/v1/softmax?x=@missing"
WAITING = {"expect": "100-continue"}
CHUNKED = head("POST", MISSING, transfer_encoding="chunked")


def ends(connection: RawConnection) -> bool:
    """Whether the server closes its side, and does not reset it."""
    connection.sock.settimeout(10)
    return connection.is_closed()


@pytest.mark.parametrize(
    "pieces",
    [
        (head("POST", MISSING, content_length="1000"),),
        (head("POST", MISSING, content_length="1000") + b"x" * 100,),
        (head("POST", MISSING, content_length="100000") + b"x" * 70_000,),
        (head("POST", MISSING, content_length="10000000") + b"x" * 100,),
        (CHUNKED + b"5\r\nab",),
        (CHUNKED + b"fffff\r\n" + b"ab" * 40_000,),
        (post(MISSING, b"x" * 1000) + head("POST", MISSING, content_length="1000") + b"x",),
        (head("PUT", "/v1/tensors/..", content_length="1000") + b"x",),
        (head("POST", MISSING, content_length="1000", **WAITING),),
    ],
    ids=lambda pieces: repr(pieces[0][:24] + b"..." + pieces[0][-12:]),
)
@pytest.mark.parametrize("is_later", [False, True])
def test_a_body_that_the_client_s_end_cuts_short_ends_the_connection(
    raw: Callable[[], RawConnection], pieces: tuple[bytes, ...], is_later: bool
) -> None:
    """Before the answer and behind it; heads that are new to the server and such that it has seen."""
    for _ in range(3):
        connection = raw()
        connection.send(*pieces)
        if is_later:
            assert connection.answer().status in (400, 404)
        connection.sock.shutdown(socket.SHUT_WR)
        statuses = []
        try:
            while True:
                statuses.append(connection.answer().status)
        except ConnectionEnded:
            assert set(statuses) <= {400, 404}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head("POST", MISSING, content_length="1000", **WAITING), 404),
        (head("POST", "/v1/softmax", content_length=str(10**12), **WAITING), 413),
        (head("POST", MISSING, transfer_encoding="chunked", **WAITING), 404),
        (head("PUT", "/v1/tensors/..", content_length="1000", **WAITING), 400),
        (head("POST", "/v1/nothing", content_length="1000", **WAITING), 404),
    ],
    ids=["missing", "too large", "chunks", "name", "op"],
)
def test_a_refused_body_that_the_client_has_not_sent_gets_its_status_alone_and_the_connection_ends(
    raw: Callable[[], RawConnection], sent: bytes, status: int
) -> None:
    connection = raw()
    connection.send(sent)
    answer = connection.answer()
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    # Some send it all the same, when they have waited for long.
    connection.send(b"x" * 100)
    assert ends(connection)


def test_a_client_that_waits_is_told_to_send(raw: Callable[[], RawConnection]) -> None:
    connection = raw()
    body = b'{"x": [1, 1]}'
    connection.send(
        head("POST", "/v1/softmax", content_length=str(len(body)), content_type="application/json", **WAITING)
    )
    assert connection.answer().status == 100
    connection.send(body)
    assert connection.answer().status == 200


def test_the_server_as_a_whole_tells_its_methods(raw: Callable[[], RawConnection]) -> None:
    connection = raw()
    for _ in range(2):
        connection.send(b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = connection.answer()
        assert answer.status == 204
        assert answer.headers["allow"] == "DELETE, GET, HEAD, POST, PUT"
    connection.send(b"GET * HTTP/1.1\r\nhost: x\r\n\r\n")
    assert connection.answer().status == 400


def test_an_older_client_is_not_told_to_send(raw: Callable[[], RawConnection]) -> None:
    connection = raw()
    body = b'{"x": [1, 1]}'
    sent = head("POST", "/v1/softmax", content_length=str(len(body)), content_type="application/json", **WAITING)
    connection.send(sent.replace(b"HTTP/1.1", b"HTTP/1.0", 1) + body)
    assert connection.answer().status == 200
