"""Trailers behind chunked bodies: they change nothing, wherever the bytes were cut, and nobody sends them without end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SMALL
from tests.support.api_keys import entry, keys_file
from tests.support.live_server import LiveServer, serving
from tests.support.raw_http import ConnectionEnded, RawConnection, head
from tests.support.tensor_bodies import TYPES, decode, to_npy

KEY, WRONG = "tw_trailers", "tw_wrong"
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
BODY = to_npy(ROWS)
OFFER = {"connection": "Upgrade", "upgrade": "h2c"}
END = b"0\r\n"
MAX_BYTES = 2**16
FLOOD_BYTES = 40 * 2**20
# What a gateway may take for one connection meanwhile, and then some for whatever else it does.
MEMORY_BYTES = 12 * 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("trailers")
    keys = keys_file(folder, entry("only", KEY, 'ops = ["*"]'))
    with serving(folder / "log", *SMALL, "--api-keys-file", str(keys)) as server:
        yield server


@pytest.fixture
def connection(server: LiveServer) -> Iterator[RawConnection]:
    with RawConnection(server.connect()) as connection:
        yield connection


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def softmax(**headers: str) -> bytes:
    return head("POST", "/v1/softmax", transfer_encoding="chunked", **headers)


def check_softmax(connection: RawConnection) -> None:
    answer = connection.answer()
    assert answer.status == 200, answer
    powers = np.exp(ROWS - ROWS.max(1, keepdims=True))
    expected = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(decode(TYPES["npy"], answer.body), expected, rtol=1e-5)


def send_cut(connection: RawConnection, first: bytes, rest: bytes, *, is_cut: bool) -> None:
    if not is_cut:
        connection.send(first + rest)
        return
    connection.send(first)
    # Nothing tells from outside that the head was read.
    time.sleep(0.05)
    connection.send(rest)


IGNORED = [
    "Authorization: Bearer tw_wrong",
    "X-API-Key: tw_wrong",
    "Content-Type: application/json",
    "Content-Encoding: gzip",
    "Accept: text/html",
    "X-Timeout-Ms: none",
    "X-Request-Id: from-a-trailer",
    "Expect: 100-continue",
]


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("offer", [{}, OFFER], ids=["plain", "offer"])
@pytest.mark.parametrize("trailer", IGNORED)
def test_a_trailer_is_no_header(connection: RawConnection, trailer: str, offer: dict[str, str], is_cut: bool) -> None:
    sent = softmax(x_api_key=KEY, content_type=TYPES["npy"], x_request_id="from-the-head", **offer)
    for _ in range(2):
        send_cut(connection, sent, chunked(BODY) + END + trailer.encode() + b"\r\n\r\n", is_cut=is_cut)
        check_softmax(connection)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("given", [{}, {"x_api_key": WRONG}], ids=["no key", "a wrong key"])
@pytest.mark.parametrize("trailer", [b"X-API-Key: %b", b"Authorization: Bearer %b"])
def test_a_key_in_a_trailer_opens_nothing(
    connection: RawConnection, trailer: bytes, given: dict[str, str], is_cut: bool
) -> None:
    rest = chunked(BODY) + END + trailer % KEY.encode() + b"\r\n\r\n"
    send_cut(connection, softmax(content_type=TYPES["npy"], **given), rest, is_cut=is_cut)
    assert connection.answer().status == 401


@pytest.mark.parametrize("sent", [softmax(x_api_key=KEY), head("GET", "/healthz", transfer_encoding="chunked")])
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_a_trailer_that_closes_the_connection_leaves_nobody_waiting(
    connection: RawConnection, sent: bytes, is_cut: bool
) -> None:
    send_cut(connection, sent, chunked(BODY) + END + b"connection: close\r\n\r\n", is_cut=is_cut)
    assert connection.answer().status == 200
    assert connection.is_closed()


def test_an_id_in_a_trailer_is_not_the_requests(connection: RawConnection) -> None:
    sent = softmax(x_api_key=KEY, content_type=TYPES["npy"], x_request_id="from-the-head")
    connection.send(sent + chunked(BODY) + END + b"x-request-id: from-a-trailer\r\n\r\n")
    assert connection.answer().headers["x-request-id"] == "from-the-head"


def test_requests_are_pipelined_behind_trailers(connection: RawConnection) -> None:
    one = softmax(x_api_key=KEY, content_type=TYPES["npy"]) + chunked(BODY) + END + b"x-api-key: none\r\n\r\n"
    connection.send(one * 5)
    for _ in range(5):
        check_softmax(connection)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_trailers_are_bounded_as_heads_are(server: LiveServer, is_cut: bool) -> None:
    sent = softmax(x_api_key=KEY, content_type=TYPES["npy"])
    line = b"name: value of a trailer\r\n"
    for num_lines, status in ((MAX_BYTES // len(line), 200), (MAX_BYTES // len(line) + 1, 400)):
        with RawConnection(server.connect()) as connection:
            send_cut(connection, sent, chunked(BODY) + END + num_lines * line + b"\r\n", is_cut=is_cut)
            answer = connection.answer()
            assert answer.status == status
            if status == 400:
                assert "trailers" in answer.json()["detail"]
                assert connection.is_closed()


FLOODS = {
    "short": b"a:b\r\n" * 2**13,
    "one that does not end": b"y" * 2**16,
}


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize(
    "sent",
    [
        head("GET", "/healthz", transfer_encoding="chunked"),
        softmax(),
        softmax(x_api_key=KEY, content_type=TYPES["npy"]),
    ],
    ids=["health without a key", "without a key", "with a key"],
)
def test_trailers_without_end_cost_nothing(server: LiveServer, sent: bytes, flood: bytes, is_cut: bool) -> None:
    (gateway,) = server.gateways()[:1]
    before = memory_bytes(gateway)
    with RawConnection(server.connect_to(gateway)) as connection:
        send_cut(connection, sent, chunked(b"hello") + END + b"a: ", is_cut=is_cut)
        sent_bytes = 0
        with contextlib.suppress(ConnectionError):
            while sent_bytes < FLOOD_BYTES:
                connection.send(flood)
                sent_bytes += len(flood)
                assert memory_bytes(gateway) < before + MEMORY_BYTES
        with contextlib.suppress(ConnectionError, ConnectionEnded):
            assert connection.answer().status in (200, 400, 401)
            assert connection.is_closed()
    assert memory_bytes(gateway) < before + MEMORY_BYTES


def memory_bytes(pid: int) -> int:
    """Memory of a process that is neither a file's nor shared."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return 1024 * int(kilobytes)
