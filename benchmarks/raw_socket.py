"""A server without a server: one process per connection, `recv_into` and `send` of a reused buffer, no parser to speak of.

    python -m benchmarks.raw_socket --port 8000

Owns the ceiling that `bench_http` compares with. Paths that begin with `/echo` send the body back, `/sink` answers its length.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket

_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
BACKLOG = 1024


def serve_one(connection: socket.socket) -> None:
    """Answers the requests of one connection, which must not be pipelined, until it ends."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(2**16)
    while True:
        have = 0
        while (end := buffer.find(_END, 0, have)) < 0:
            received = connection.recv_into(memoryview(buffer)[have:])
            if not received:
                return
            have += received
        head = bytes(buffer[:end])
        length = _LENGTH.search(head)
        begin = end + len(_END)
        total = begin + (int(length[1]) if length else 0)
        if total > len(buffer):
            # Its pages are there from now on: the next body of this size faults none in.
            buffer.extend(bytes(total - len(buffer)))
        with memoryview(buffer) as view:
            while have < total:
                received = connection.recv_into(view[have:total])
                if not received:
                    return
                have += received
            answer = view[begin:total] if b" /echo" in head else memoryview(str(total - begin).encode())
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer), socket.MSG_MORE)
            connection.sendall(answer)
            answer.release()


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    # Nobody waits for the children: the system takes them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.create_server(("127.0.0.1", parser.parse_args().port), backlog=BACKLOG)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            with contextlib.suppress(OSError):
                serve_one(connection)
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main()
