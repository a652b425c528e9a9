"""What real and broken clients do on the wire: chunks, pipelines, slow bytes, lies about lengths, early ends.

After each of them the server answers the next request and holds no memory for the last one.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable, Iterator
from threading import Thread

import httpx
import numpy as np
import pytest

from tests.support.exposition import is_idle, scrape, settles, total
from tests.support.float64_oracle import random_array
from tests.support.live_server import LiveServer
from tests.support.product import BODY, MATMUL, A, check_product
from tests.support.raw_http import Answer, ConnectionEnded, RawConnection, head, post
from tests.support.tensor_bodies import TYPES, Array, decode, to_safetensors

Raw = Callable[[], RawConnection]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(client: httpx.Client) -> Iterator[None]:
    yield
    response = client.post("/v1/matmul", content=BODY, headers={"content-type": TYPES["safetensors"]})
    assert response.status_code == 200
    check_product(response.content)
    assert settles(client, is_idle), scrape(client)


def final_answer(connection: RawConnection) -> Answer:
    """The answer behind any interim one."""
    while (answer := connection.answer()).status == 100:
        pass
    return answer


def product_of(seed: int, size: int) -> tuple[bytes, Array]:
    a, b = random_array("float32", (size, size), seed), random_array("float32", (size, size), seed + 1)
    return to_safetensors({"a": a, "b": b}), a.astype(np.float64) @ b.astype(np.float64)


def test_many_requests_on_one_connection(raw: Raw) -> None:
    connection = raw()
    for _ in range(50):
        connection.send(MATMUL)
        check_product(connection.answer().body)


def test_pipelined_requests_are_answered_in_order(raw: Raw) -> None:
    connection = raw()
    shifts = range(10)
    bodies = [to_safetensors({"a": A, "b": np.full((8, 8), shift, np.float32)}) for shift in shifts]
    connection.send(b"".join(post("/v1/add", body, x_request_id=f"r{shift}") for shift, body in enumerate(bodies)))
    for shift in shifts:
        answer = connection.answer()
        assert answer.headers["x-request-id"] == f"r{shift}"
        np.testing.assert_array_equal(decode(TYPES["safetensors"], answer.body), A + np.float32(shift))


def test_bodies_that_come_whole_with_their_heads_keep_the_connection(raw: Raw) -> None:
    """A body is not counted as a part of its head, however much of it one read brings."""
    connection = raw()
    x = random_array("float32", (24_000,), 4)
    sent = post("/v1/add", to_safetensors({"a": x[:12_000], "b": x[12_000:]}))
    assert 2**16 < len(sent) < 2**17
    for _ in range(20):
        connection.send(sent)
        answer = connection.answer()
        assert "connection" not in answer.headers
        np.testing.assert_array_equal(decode(TYPES["safetensors"], answer.body), x[:12_000] + x[12_000:])


def test_chunked_bodies(raw: Raw) -> None:
    for size in (1, 7, len(BODY)):
        connection = raw()
        connection.send(head("POST", "/v1/matmul", transfer_encoding="chunked"))
        pieces = [BODY[start : start + size] for start in range(0, len(BODY), size)]
        connection.send(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")
        check_product(connection.answer().body)


def test_a_chunked_body_larger_than_its_first_slot(client: httpx.Client) -> None:
    body, expected = product_of(3, 640)
    assert len(body) > 3 * 2**20
    response = client.post("/v1/matmul", content=(body[at : at + 100_000] for at in range(0, len(body), 100_000)))
    assert response.status_code == 200
    np.testing.assert_allclose(decode(TYPES["safetensors"], response.content), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "chunks",
    [b"5\r\nabc", b"zz\r\nabc\r\n0\r\n\r\n", b"-1\r\n\r\n", b"ffffffffffffffffff\r\nabc", b"3\r\nabcdef\r\n0\r\n\r\n"],
)
def test_broken_chunks(raw: Raw, chunks: bytes) -> None:
    connection = raw()
    connection.send(head("POST", "/v1/matmul", transfer_encoding="chunked"), chunks)
    connection.sock.shutdown(socket.SHUT_WR)
    try:
        answer = connection.answer()
    except ConnectionEnded:
        return
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/problem+json"


def test_expect_100_continue(raw: Raw) -> None:
    connection = raw()
    connection.send(head("POST", "/v1/matmul", content_length=str(len(BODY)), expect="100-continue"))
    assert connection.answer().status == 100
    connection.send(BODY)
    check_product(connection.answer().body)


@pytest.mark.parametrize(
    ("target", "length", "status"),
    [("/v1/matmul", 5 * 10**9, 413), ("/v1/matmul?nonsense=1", 10**6, 400), ("/v1/matmul?b=@none", 10**6, 404)],
)
def test_a_refused_client_that_waits_to_continue_is_not_told_to(
    raw: Raw, target: str, length: int, status: int
) -> None:
    connection = raw()
    connection.send(head("POST", target, content_length=str(length), expect="100-continue"))
    assert connection.answer().status == status
    assert connection.is_closed()


def test_an_answer_without_the_body_that_a_client_holds_back_is_the_last(raw: Raw) -> None:
    """The client may send that body behind the answer, or not: the next bytes could be read in two ways."""
    connection = raw()
    connection.send(head("POST", "/v2/cudasharedmemory/unregister", content_length="5", expect="100-continue"))
    answer = connection.answer()
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert connection.is_closed()


def test_five_gigabytes_claimed_with_ten_bytes_sent(raw: Raw) -> None:
    connection = raw()
    connection.send(head("POST", "/v1/matmul", content_length=str(5 * 10**9)) + b"0123456789")
    answer = connection.answer()
    assert answer.status == 413
    assert answer.headers["connection"] == "close"


def test_a_refused_upload_still_gets_its_answer(raw: Raw) -> None:
    # Large enough that a server which closes without reading resets the connection under the client.
    connection = raw()
    connection.send(head("POST", "/v1/matmul?nonsense=1", content_length=str(2**23)))
    connection.send(*(bytes(2**18) for _ in range(32)))
    answer = connection.answer()
    assert answer.status == 400
    assert "nonsense" in answer.json()["detail"]


def test_a_small_refused_body_does_not_cost_the_connection(raw: Raw) -> None:
    connection = raw()
    connection.send(post("/v1/matmul?nonsense=1", BODY))
    assert connection.answer().status == 400
    connection.send(MATMUL)
    check_product(connection.answer().body)


def test_byte_by_byte(raw: Raw) -> None:
    connection = raw()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.send(*(MATMUL[at : at + 1] for at in range(len(MATMUL))))
    check_product(connection.answer().body)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("sent", [0, 1, len(BODY) // 2])
def test_half_a_body_and_gone(raw: Raw, client: httpx.Client, sent: int, is_reset: bool) -> None:
    before = total(scrape(client), "tilewire_requests_total", op="matmul", code="499")
    connection = raw()
    connection.send(head("POST", "/v1/matmul", content_length=str(len(BODY))) + BODY[:sent])
    if is_reset:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sock.close()
    # It is counted as a client that left, and as nobody's error.
    assert settles(client, lambda now: total(now, "tilewire_requests_total", op="matmul", code="499") == before + 1)


def test_gone_while_it_is_computed(server: LiveServer, client: httpx.Client) -> None:
    body, _ = product_of(5, 700)
    before = scrape(client)
    connections = [RawConnection(server.connect()) for _ in range(4)]
    for connection in connections:
        connection.send(post("/v1/matmul", body))
    for connection in connections:
        connection.sock.close()
    count = "tilewire_requests_total"
    # A client whose answer was written before its end was noticed counts as answered.
    assert settles(client, lambda now: total(now, count, op="matmul") == total(before, count, op="matmul") + 4)
    after = scrape(client)
    assert total(after, count, code="500") == total(before, count, code="500")
    assert settles(client, is_idle)


def test_gone_while_it_downloads(raw: Raw, client: httpx.Client) -> None:
    x = np.zeros((2**21,), np.float32)
    connection = raw()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.send(post("/v1/softmax", to_safetensors({"x": x})))
    connection.sock.recv(1000)
    assert settles(client, lambda now: not is_idle(now))
    connection.sock.close()
    assert settles(client, is_idle)


GARBAGE = [
    b"\x00\x01\x02\x03\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/matmul HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n",
    b"POST /v1/matmul HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/matmul HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999999\r\n\r\n",
    b"POST /v1/matmul HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    b"POST /v1/matmul HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\n: empty\r\n\r\n",
    b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(20_000)) + b"\r\n",
]


@pytest.mark.parametrize("sent", GARBAGE, ids=lambda sent: repr(sent[:40]))
def test_what_is_no_http_is_400_as_problem_details(raw: Raw, sent: bytes) -> None:
    connection = raw()
    connection.send(sent)
    answer = connection.answer()
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem.keys() == {"type", "title", "status", "detail", "request_id"}
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert len(answer.body) < 1000


def test_a_head_that_never_ends_is_refused(raw: Raw) -> None:
    connection = raw()
    connection.send(b"GET / HTTP/1.1\r\nx: ")
    connection.send(*(b"y" * 2**16 for _ in range(32)))
    assert connection.answer().status == 400


def test_bytes_behind_a_request_do_not_break_into_its_answer(raw: Raw) -> None:
    connection = raw()
    x = random_array("float32", (2**18,), 7)
    connection.send(post("/v1/add", to_safetensors({"a": x, "b": x})) + b"\x00 this is no HTTP \r\n\r\n")
    answer = connection.answer()
    assert answer.status == 200
    np.testing.assert_array_equal(decode(TYPES["safetensors"], answer.body), x + x)


def test_http_1_0(raw: Raw) -> None:
    connection = raw()
    connection.send(MATMUL.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    check_product(connection.answer().body)
    assert connection.is_closed()


def test_connection_close_is_kept(raw: Raw) -> None:
    connection = raw()
    connection.send(post("/v1/matmul", BODY, connection="close"))
    answer = connection.answer()
    assert answer.headers["connection"] == "close"
    check_product(answer.body)
    assert connection.is_closed()


@pytest.mark.parametrize(
    "target", ["//v1/matmul", "/v1//matmul", "/v1/./matmul", "/v1/../v1/matmul", "*", "http://x/v1/matmul"]
)
def test_other_spellings_reach_nothing_unexpected(raw: Raw, target: str) -> None:
    connection = raw()
    connection.send(post(target, BODY))
    answer = connection.answer()
    assert answer.status in (200, 400, 404, 405)


def test_a_client_that_leaves_after_a_large_body_frees_everything(raw: Raw, client: httpx.Client) -> None:
    """Large bodies take the way around the parser; the disconnect must be noticed on it too."""
    a = np.random.default_rng(0).standard_normal((1500, 1500)).astype(np.float32)
    body = to_safetensors({"a": a, "b": a})
    for _ in range(3):
        connection = raw()
        connection.send(post("/v1/matmul", body))
        connection.sock.close()
    assert settles(client, is_idle), scrape(client)


def test_large_bodies_back_to_back_on_one_connection(raw: Raw) -> None:
    """The next request's bytes are in the socket while this one's body is received around the parser."""
    rng = np.random.default_rng(1)
    bodies = [rng.standard_normal((400, 700)).astype(np.float32) for _ in range(4)]
    connection = raw()
    sender = Thread(
        target=connection.send, args=(b"".join(post("/v1/add", to_safetensors({"a": x, "b": x})) for x in bodies),)
    )
    sender.start()
    for x in bodies:
        np.testing.assert_array_equal(decode(TYPES["safetensors"], connection.answer().body), x + x)
    sender.join()


def test_a_client_that_only_ended_its_side_is_answered(raw: Raw) -> None:
    connection = raw()
    connection.send(MATMUL)
    connection.sock.shutdown(socket.SHUT_WR)
    check_product(final_answer(connection).body)
    assert connection.is_closed()


def test_pipelined_requests_and_then_the_end_of_one_side(raw: Raw) -> None:
    connection = raw()
    connection.send(MATMUL * 5)
    connection.sock.shutdown(socket.SHUT_WR)
    for _ in range(5):
        check_product(final_answer(connection).body)
    assert connection.is_closed()


def test_a_large_body_and_then_the_end_of_one_side(raw: Raw) -> None:
    connection = raw()
    x = random_array("float32", (2**19,), 7)
    connection.send(post("/v1/add", to_safetensors({"a": x, "b": x})))
    connection.sock.shutdown(socket.SHUT_WR)
    answer = final_answer(connection)
    np.testing.assert_array_equal(decode(TYPES["safetensors"], answer.body), x + x)
    assert connection.is_closed()


HALVES = {
    "nothing of it": head("POST", "/v1/matmul", content_length="1000", x_request_id="half"),
    "most of it": head("POST", "/v1/matmul", content_length=str(len(BODY)), x_request_id="half") + BODY[:-1],
    "much": head("POST", "/v1/matmul", content_length=str(2**23), x_request_id="half") + bytes(2**22),
    "in a chunk": head("POST", "/v1/matmul", transfer_encoding="chunked", x_request_id="half") + b"5\r\nab",
    "between chunks": head("POST", "/v1/matmul", transfer_encoding="chunked", x_request_id="half") + b"2\r\nab\r\n",
    "of an upload": head("PUT", "/v1/tensors/half", content_length="1000", x_request_id="half") + b"x",
    "of v2": head("POST", "/v2/models/matmul/infer", content_length="1000", x_request_id="half") + b"{",
}


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
def test_half_a_body_and_the_end_of_one_side_are_400(raw: Raw, client: httpx.Client, sent: bytes) -> None:
    count = "tilewire_requests_total"
    before = total(scrape(client), count, op="matmul", code="400")
    is_counted = b"matmul" in sent
    # The first head is new to the server, the others are not.
    for _ in range(3):
        connection = raw()
        connection.send(sent)
        connection.sock.shutdown(socket.SHUT_WR)
        answer = connection.answer()
        assert answer.status == 400
        problem = answer.json()
        assert re.search(
            r"^body: the client ended its side after \d+ bytes", problem.get("detail", problem.get("error"))
        )
        assert answer.headers["x-request-id"] == "half"
        assert answer.headers["connection"] == "close"
        assert connection.is_closed()
    assert settles(client, lambda now: total(now, count, op="matmul", code="400") == before + 3 * is_counted)
    assert settles(client, is_idle)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTT", MATMUL[:20]])
def test_the_end_of_one_side_within_a_head_ends_the_connection(raw: Raw, sent: bytes) -> None:
    connection = raw()
    connection.send(sent)
    connection.sock.shutdown(socket.SHUT_WR)
    assert connection.is_closed()


def test_a_small_answer_leaves_in_one_piece(raw: Raw) -> None:
    connection = raw()
    for _ in range(20):
        connection.send(MATMUL)
        piece = connection.sock.recv(2**16)
        head_end = piece.index(b"\r\n\r\n") + 4
        check_product(piece[head_end:])


@pytest.mark.parametrize("num_before", [1, 3])
def test_a_broken_body_behind_other_requests_leaves_them_their_answers(raw: Raw, num_before: int) -> None:
    connection = raw()
    broken = head("POST", "/v1/matmul", transfer_encoding="chunked", x_request_id="broken") + b"2\r\nab\r\nzz\r\n"
    connection.send(MATMUL * num_before + broken + MATMUL)
    for _ in range(num_before):
        check_product(connection.answer().body)
    answer = connection.answer()
    assert (answer.status, answer.headers["x-request-id"]) == (400, "broken")
    assert "not understood as HTTP" in answer.json()["detail"]
    assert connection.is_closed()


@pytest.mark.parametrize("request_", [MATMUL, post("/v1/matmul?b=@none", b"")], ids=["computed", "refused"])
def test_garbage_behind_a_request_and_the_end_leave_it_its_answer(raw: Raw, request_: bytes) -> None:
    connection = raw()
    connection.send(request_ + b"xx")
    connection.sock.shutdown(socket.SHUT_WR)
    assert final_answer(connection).status == (200 if request_ is MATMUL else 404)
