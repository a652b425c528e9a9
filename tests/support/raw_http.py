"""HTTP/1.1 by hand on a socket: sends exactly the bytes that a test wants sent, reads answers as a strict client does."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any, Self


class ConnectionEnded(Exception):
    """The peer closed before a whole answer."""


@dataclass
class Answer:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class RawConnection:
    """Reads answers one after the other from a socket; what came too early waits."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.sock.close()

    def send(self, *pieces: bytes) -> None:
        """Sends the pieces, each as a write of its own."""
        for piece in pieces:
            self.sock.sendall(piece)

    def answer(self, *, is_head: bool = False) -> Answer:
        """Reads one whole answer; a 100 Continue counts as one.

        Raises:
            ConnectionEnded: The peer closed first.
        """
        head = self._until(b"\r\n\r\n").decode("latin-1")
        status_line, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        version, status, *_ = status_line.split(" ")
        assert version == "HTTP/1.1", status_line
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = b""
        if not is_head and status not in ("100", "204") and "content-length" in headers:
            body = self._exactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body = self._chunks()
        return Answer(int(status), headers, body)

    def is_closed(self) -> bool:
        """Whether the peer closes without another byte."""
        try:
            return not self._buffer and self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._receive()
        found, _, self._buffer = self._buffer.partition(mark)
        return found + mark

    def _exactly(self, nbytes: int) -> bytes:
        while len(self._buffer) < nbytes:
            self._receive()
        found, self._buffer = self._buffer[:nbytes], self._buffer[nbytes:]
        return found

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self._until(b"\r\n"), 16):
            body += self._exactly(size + 2)[:-2]
        self._until(b"\r\n")
        return body

    def _receive(self) -> None:
        piece = self.sock.recv(2**20)
        if not piece:
            raise ConnectionEnded(self._buffer[:200])
        self._buffer += piece


def head(method: str, target: str, **headers: str) -> bytes:
    """A request head; underscores in header names become dashes."""
    lines = [f"{method} {target} HTTP/1.1", "host: tests"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def post(target: str, body: bytes, **headers: str) -> bytes:
    """A whole POST with its length."""
    return head("POST", target, content_length=str(len(body)), **headers) + body
