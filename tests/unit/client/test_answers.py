"""Answers are read alike however their bytes come, and what is no answer is refused."""

from __future__ import annotations

import http.client

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewire._transport.answers import read_answer
from tilewire._transport.wire import Call, Reply

GET = Call("GET", "/x")
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Note:  a: b \r\nx-note: second\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nX-Sum: 1\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


def read(stream: bytes, *cuts: int, call: Call = GET, takes: int = 2**20) -> tuple[Reply, bool]:
    """Reads an answer that comes in pieces, cut at these offsets and of so many bytes at most; then the connection ends."""
    ends = [*sorted(set(cuts) - {0}), len(stream)]
    reading, begin = read_answer(call), 0
    try:
        space = next(reading)
        while True:
            end = next((one for one in ends if one > begin), begin)
            count = min(end - begin, space.nbytes, takes)
            space[:count] = stream[begin : begin + count]
            begin += count
            space = reading.send(count)
    except StopIteration as done:
        reply, is_kept = done.value
    return reply, is_kept


@pytest.mark.parametrize("stream", [SIZED, CHUNKED, ENDLESS, INTERIM])
@given(cuts=st.lists(st.integers(0, len(INTERIM)), max_size=5))
def test_any_cut_gives_the_same_answer(stream: bytes, cuts: list[int]) -> None:
    reply, is_kept = read(stream, *(cut for cut in cuts if cut < len(stream)))
    assert (reply.status, bytes(reply.body), is_kept) == (200, b"hello", stream is not ENDLESS)


@pytest.mark.parametrize("stream", [SIZED, CHUNKED, ENDLESS, INTERIM])
def test_a_byte_at_a_time_does(stream: bytes) -> None:
    assert bytes(read(stream, takes=1)[0].body) == b"hello"


def test_headers_are_found_by_name_in_any_case_and_the_first_of_a_name_counts() -> None:
    headers = read(SIZED)[0].headers
    assert (headers.get("X-NOTE"), headers.get("content-length"), headers.get("x-none")) == ("a: b", "5", None)


@pytest.mark.parametrize(
    "stream",
    [
        SIZED.replace(b"1.1", b"1.0"),
        SIZED.replace(b"X-Note", b"Connection: Close\r\nX-Note"),
        SIZED + b"more than was announced",
    ],
)
def test_a_connection_that_ends_or_has_more_is_not_used_again(stream: bytes) -> None:
    reply, is_kept = read(stream)
    assert (bytes(reply.body), is_kept) == (b"hello", False)


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
def test_some_answers_have_no_body(method: str, status: int) -> None:
    stream = b"HTTP/1.1 %d \r\nContent-Length: 5\r\n\r\n" % status
    reply, is_kept = read(stream, call=Call(method, "/x"))
    assert (reply.status, bytes(reply.body), is_kept) == (status, b"", True)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"", http.client.RemoteDisconnected),
        (b"HTTP/1.1 200 OK\r\nConten", http.client.IncompleteRead),
        (SIZED[:-1], http.client.IncompleteRead),
        (CHUNKED[:-30], http.client.IncompleteRead),
        (CHUNKED.replace(b"2;x", b"-2;x"), http.client.HTTPException),
        (CHUNKED.replace(b"2;x", b";x"), http.client.HTTPException),
        (CHUNKED.replace(b"2;x", b"0x2;x"), http.client.HTTPException),
        (b"SSH-2.0-OpenSSH\r\n\r\n", http.client.BadStatusLine),
        # As a gRPC port answers: the end of a line may never come.
        (b"\0\0\x18\x04\0\0\0", http.client.BadStatusLine),
        (b"HTTP/1.1\r\n\r\n", http.client.BadStatusLine),
        (b"HTTP/1.1 two hundred\r\n\r\n", http.client.BadStatusLine),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**17, http.client.LineTooLong),
        (CHUNKED[:48] + b"0" * 2**17, http.client.LineTooLong),
    ],
)
def test_what_is_no_answer_is_an_error(stream: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(stream)
