"""A server that does on each connection what a script says: answers bytes, closes, resets. Real sockets, no rules."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread

Act = Callable[[socket.socket], None]


def read_request(connection: socket.socket) -> bytes:
    """One request with its body; nothing where the client closed."""
    got = b""
    while b"\r\n\r\n" not in got:
        piece = connection.recv(65536)
        if not piece:
            return got
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < int(lengths[0] if lengths else 0):
        body += connection.recv(2**20)
    return head + b"\r\n\r\n" + body


def answers(*replies: bytes) -> Act:
    """Reads a request before each of these bytes, and closes at the end."""

    def act(connection: socket.socket) -> None:
        for reply in replies:
            read_request(connection)
            connection.sendall(reply)

    return act


def resets(connection: socket.socket) -> None:
    """Reads a request and resets the connection."""
    read_request(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def closes(connection: socket.socket) -> None:
    """Reads a request and closes without an answer."""
    read_request(connection)


@contextmanager
def together(num: int, reply: bytes) -> Iterator[str]:
    """Answers none of so many connections before a request has come over each; the address."""
    with socket.create_server(("127.0.0.1", 0), backlog=num) as listener, ExitStack() as stack:
        listener.settimeout(30)

        def serve() -> None:
            with suppress(OSError):
                connections = [stack.enter_context(listener.accept()[0]) for _ in range(num)]
                for connection in connections:
                    read_request(connection)
                for connection in connections:
                    connection.sendall(reply)

        thread = Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


@contextmanager
def scripted(*acts: Act) -> Iterator[str]:
    """Serves as many connections as there are acts, one after the other; the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for act in acts:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    act(connection)

    thread = Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        assert not thread.is_alive()
