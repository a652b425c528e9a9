"""Reads answers of HTTP/1.1 from bytes that somebody else receives: a thread or an event loop. ADR 0022 has the figures."""

from __future__ import annotations

import http.client
import string
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from tilewire._transport.wire import Call, Reply, memory_for

T = TypeVar("T")

# Between two calls of a progress function.
STEP_BYTES = 2**22
# Heads and small answers come in one piece of this size; what a large body has of it is copied.
_READ_BYTES = 2**14
_MAX_HEAD_BYTES = 2**16
_END_OF_HEAD = b"\r\n\r\n"
_BEGIN_OF_HEAD = b"HTTP/"

# Yields memory to receive into, is sent how many bytes came, 0 for the end of the connection, and returns what it read.
Reading = Generator[memoryview, int, T]


@dataclass(frozen=True, slots=True)
class HeaderFields:
    """Headers of an answer.

    Attributes:
        by_name: The first value of each name, by the name in lower case.
    """

    by_name: dict[str, str]

    def get(self, name: str, /) -> str | None:
        """Returns a header by its name in any case, or None without it."""
        return self.by_name.get(name.lower())


def read_answer(call: Call) -> Reading[tuple[Reply, bool]]:
    """Reads the answer of a call.

    Returns:
        The answer, and whether its connection can be used again.

    Raises:
        http.client.HTTPException: It is no HTTP/1.1, or ends too early.
        ConnectionError: The connection ended without an answer.
    """
    return (yield from _Answer(call).read())


class _Answer:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._space = memoryview(bytearray(_READ_BYTES))
        # Bytes that were received and not yet used.
        self._rest = bytearray()

    def read(self) -> Reading[tuple[Reply, bool]]:
        status = 0
        while status < 200:
            status, version, headers = yield from self._head()
        body, is_whole = yield from self._body(status, headers)
        closes = version == "HTTP/1.0" or "close" in (headers.get("connection") or "").lower()
        return Reply(status, headers, body), is_whole and not closes and not self._rest

    def _head(self) -> Reading[tuple[int, str, HeaderFields]]:
        while (end := self._rest.find(_END_OF_HEAD)) < 0:
            if len(self._rest) > _MAX_HEAD_BYTES:
                raise http.client.LineTooLong("head")
            yield from self._more()
            if not _BEGIN_OF_HEAD.startswith(self._rest[: len(_BEGIN_OF_HEAD)]):
                raise _no_status(bytes(self._rest[:24]))
        first, *lines = self._rest[:end].decode("latin-1").split("\r\n")
        del self._rest[: end + len(_END_OF_HEAD)]
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdecimal():
            raise _no_status(first.encode("latin-1")[:24])
        by_name: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            by_name.setdefault(name.lower(), value.strip())
        return int(words[1]), words[0], HeaderFields(by_name)

    def _body(self, status: int, headers: HeaderFields) -> Reading[tuple[memoryview, bool]]:
        if self._call.method == "HEAD" or status in (204, 304):
            return memoryview(b""), True
        if "chunked" in (headers.get("transfer-encoding") or "").lower():
            return (yield from self._chunked()), True
        length = headers.get("content-length") or ""
        if not length.isdecimal():
            while (yield from self._more(is_end_allowed=True)):
                pass
            body, self._rest = self._rest, bytearray()
            return memoryview(body), False
        return (yield from self._sized(memory_for(self._call, status, headers, int(length)))), True

    def _sized(self, body: memoryview) -> Reading[memoryview]:
        received = min(len(self._rest), body.nbytes)
        body[:received] = self._rest[:received]
        del self._rest[:received]
        while received < body.nbytes:
            count = yield body[received : received + STEP_BYTES]
            if not count:
                raise http.client.IncompleteRead(b"", body.nbytes - received)
            received += count
            if self._call.progress is not None:
                self._call.progress(received, body.nbytes)
        return body

    def _chunked(self) -> Reading[memoryview]:
        body = bytearray()
        while True:
            line = yield from self._line()
            size = _size_of(line)
            if not size:
                break
            body += yield from self._exactly(size)
            yield from self._line()
        # The trailers.
        while (yield from self._line()):
            pass
        return memoryview(body)

    def _line(self) -> Reading[bytes]:
        while (end := self._rest.find(b"\r\n")) < 0:
            if len(self._rest) > _MAX_HEAD_BYTES:
                raise http.client.LineTooLong("chunk")
            yield from self._more()
        line = bytes(self._rest[:end])
        del self._rest[: end + 2]
        return line

    def _exactly(self, size: int) -> Reading[bytes]:
        while len(self._rest) < size:
            yield from self._more()
        piece = bytes(self._rest[:size])
        del self._rest[:size]
        return piece

    def _more(self, *, is_end_allowed: bool = False) -> Reading[bool]:
        count = yield self._space
        if not count and not is_end_allowed:
            if self._rest:
                raise http.client.IncompleteRead(bytes(self._rest))
            raise http.client.RemoteDisconnected("the server closed the connection without an answer")
        self._rest += self._space[:count]
        return count > 0


def _no_status(begin: bytes) -> http.client.BadStatusLine:
    return http.client.BadStatusLine(
        f"the answer is no HTTP/1.1: it begins with {begin!r}; is this the address of a Tilewire server?"
    )


def _size_of(line: bytes) -> int:
    """Bytes of a chunk, from the line before it."""
    digits = line.partition(b";")[0].strip()
    if not digits or digits.strip(string.hexdigits.encode()):
        raise http.client.HTTPException(f"no size of a chunk: {digits[:64]!r}")
    return int(digits, 16)
