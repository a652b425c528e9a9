"""A hundred thousand different requests over 32 connections, some of which break: no answer may be lost or another's.

    python -m tests.support.many_requests http://127.0.0.1:8000 --requests 100000

Owns a client that is cheap enough to keep a server busy: one thread, plain sockets, bodies made by changing a few bytes. Each
request adds two tensors of its own, so its answer's bytes are known without the server; every answer is compared byte for byte.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np

from tests.support.raw_http import head
from tests.support.tensor_bodies import TYPES, from_safetensors, to_safetensors

NUMBERS = 256
# One request in so many is cut off: before its body, within it, or with its answer unread.
CUT_EVERY = 50
END = b"\r\n\r\n"
# What is new in each head of a connection: nothing, an id, or what no gateway remembers.
NEW = ("", "x_request_id", "x_number")


def request(number: int, new: str = "") -> tuple[bytes, np.ndarray]:
    """A request that no other one equals, and the tensor that answers it; its head differs from others' in one header."""
    a = np.arange(number, number + NUMBERS, dtype=np.int32)
    b = np.full(NUMBERS, number * 7919 % 2**31, np.int32)
    body = to_safetensors({"a": a, "b": b})
    content_length = str(len(body))
    headers = {"content_type": TYPES["safetensors"]}
    if new:
        headers[new] = f"n-{number}"
    return head("POST", "/v1/add", content_length=content_length, **headers) + body, a + b


@dataclass
class Line:
    """One connection, its request under way, and what has come of the answer."""

    sock: socket.socket
    new: str
    number: int = -1
    expected: np.ndarray = field(default_factory=lambda: np.empty(0))
    received: bytearray = field(default_factory=bytearray)
    is_cut: bool = False


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        sent: Begun.
        compared: Answered, and equal byte for byte.
        cut: Whose connection was broken on purpose.
        wrong: Descriptions of wrong answers.
    """

    sent: int = 0
    compared: int = 0
    cut: int = 0
    wrong: list[str] = field(default_factory=list)


class ManyRequests:
    """Keeps connections busy until so many requests have been sent.

    Args:
        url: Of the server.
        num_requests: How many.
        num_connections: Kept open; broken ones are opened again, and the kernel spreads them over the gateways.
    """

    def __init__(self, url: str, num_requests: int, num_connections: int = 32) -> None:
        place = urlsplit(url)
        self._address = (place.hostname or "127.0.0.1", place.port or 80)
        self._num_requests = num_requests
        self._num_connections = num_connections
        self._random = random.Random(num_requests)
        self._poll = select.epoll()
        self._lines: dict[int, Line] = {}
        self._num_opened = 0
        self.tally = Tally()

    def run(self) -> Tally:
        """Sends all of them; returns when each is answered or cut."""
        for _ in range(min(self._num_connections, self._num_requests)):
            self._open()
        while self._lines:
            for fd, _happened in self._poll.poll(60) or [(-1, 0)]:
                assert fd >= 0, f"no answer for a minute: {self.tally}"
                self._receive(self._lines[fd])
        self._poll.close()
        return self.tally

    def _open(self) -> None:
        sock = socket.create_connection(self._address, timeout=60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._num_opened += 1
        self._lines[sock.fileno()] = line = Line(sock, NEW[self._num_opened % len(NEW)])
        self._poll.register(sock, select.EPOLLIN)
        self._send(line)

    def _close(self, line: Line) -> None:
        del self._lines[line.sock.fileno()]
        self._poll.unregister(line.sock)
        line.sock.close()

    def _send(self, line: Line) -> None:
        """The next request of a connection; some are cut off at a random byte or left without reading their answer."""
        if self.tally.sent == self._num_requests:
            self._close(line)
            return
        line.number = self.tally.sent
        self.tally.sent += 1
        data, line.expected = request(line.number, line.new)
        if self._random.randrange(CUT_EVERY) == 0:
            line.sock.sendall(data[: self._random.randrange(len(data) + 1)])
            self.tally.cut += 1
            self._close(line)
            self._open()
            return
        line.sock.sendall(data)

    def _receive(self, line: Line) -> None:
        piece = line.sock.recv(2**16)
        line.received += piece
        if not piece:
            self.tally.wrong.append(f"{line.number}: the connection ended after {bytes(line.received[:200])!r}")
            self._close(line)
            self._open()
            return
        end = line.received.find(END)
        if end < 0:
            return
        length = int(line.received[:end].lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        whole = end + len(END) + length
        if len(line.received) >= whole:
            self._compare(line, bytes(line.received[:end]), bytes(line.received[end + len(END) :]))
            line.received.clear()
            self._send(line)

    def _compare(self, line: Line, answer_head: bytes, body: bytes) -> None:
        name = b"x-request-id: n-%d\r\n" % line.number if line.new == "x_request_id" else b""
        is_ours = answer_head.startswith(b"HTTP/1.1 200 ") and name in answer_head + END
        if is_ours and from_safetensors(body)["out"].tobytes() == line.expected.tobytes():
            self.tally.compared += 1
        else:
            self.tally.wrong.append(f"{line.number}: {answer_head[:300]!r}")


def main() -> int:
    """Runs against a server and prints the tally."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=32)
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    tally = ManyRequests(arguments.url, arguments.requests, arguments.connections).run()
    seconds = time.perf_counter() - began_s
    print(
        f"{tally.sent} requests over {arguments.connections} connections in {seconds:.1f} s: {tally.compared} answers "
        f"compared byte for byte, {tally.cut} connections cut, {len(tally.wrong)} wrong"
    )
    print("\n".join(tally.wrong[:20]))
    return 1 if tally.wrong or tally.compared + tally.cut != tally.sent else 0


if __name__ == "__main__":
    sys.exit(main())
