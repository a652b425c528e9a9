"""A transport of its own for plain HTTP: kept connections, vectored writes, answers received where they stay.

A call of 16 KiB costs a fifth of httpx's. A body of 32 MiB is neither cut into pieces nor copied. ADR 0022 has the figures.
"""

from __future__ import annotations

import http.client
import socket
from collections import deque
from collections.abc import Mapping
from urllib.parse import urlsplit

from tilewire._transport.answers import STEP_BYTES, read_answer
from tilewire._transport.wire import Call, Reply, failed

# Idle connections that are kept; as many as httpx keeps would make fewer threads wait for a handshake.
MAX_IDLE = 100
# The largest number of buffers in one `sendmsg`, by POSIX's least IOV_MAX.
_MAX_VIEWS = 16
# Windows has no vectored write.
_IS_VECTORED = hasattr(socket.socket, "sendmsg")
_DEFAULT_PORT = 80


class HeadWriter:
    """Writes the heads of requests to one server.

    Args:
        base_url: `http://…`, with a path prefix where a proxy needs one.
        headers: Headers of every request.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(base_url)
        assert parts.hostname is not None, "This is a bug."
        self.address = (parts.hostname, parts.port or _DEFAULT_PORT)
        self._prefix = parts.path
        self._headers = {"Host": parts.netloc.rpartition("@")[2], **headers}

    def head_of(self, call: Call) -> bytes:
        """Returns the head of a request."""
        lines = [f"{call.method} {self._prefix}{call.target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**self._headers, **call.headers}.items()]
        return "\r\n".join([*lines, "\r\n"]).encode("latin-1")


class IdleConnections:
    """Connections to one server that wait for their next call. Safe to share between threads.

    Attributes:
        kept: They, the one used last at the end.
    """

    def __init__(self) -> None:
        self.kept: deque[socket.socket] = deque()

    def take(self) -> socket.socket | None:
        """Returns one that the server has not closed meanwhile, or None without any."""
        while self.kept:
            try:
                connection = self.kept.pop()
            except IndexError:
                # Another thread took the last one.
                break
            if not is_readable(connection):
                return connection
            connection.close()
        return None

    def keep(self, connection: socket.socket) -> None:
        """Keeps one for its next call; closes it where there are plenty."""
        if len(self.kept) < MAX_IDLE:
            self.kept.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Closes all of them."""
        while (connection := self.take()) is not None:
            connection.close()

    def __del__(self) -> None:
        self.close()


class SocketTransport:
    """Keeps connections to one server. Safe to share between threads: each call has a connection to itself.

    Args:
        base_url: `http://…`, with a path prefix where a proxy needs one.
        timeout_s: Seconds without progress on a connection; None for no limit.
        headers: Headers of every request.
    """

    def __init__(self, base_url: str, timeout_s: float | None, headers: Mapping[str, str]) -> None:
        self._idle = IdleConnections()
        self._base_url = base_url
        self._writer = HeadWriter(base_url, headers)
        self._timeout_s = timeout_s

    def exchange(self, call: Call) -> Reply:
        """Sends a request and waits for the whole answer.

        Raises:
            ConnectionFailed: No answer.
        """
        try:
            connection = self._connection(call.bounded(self._timeout_s))
            try:
                reply, is_kept = self._exchange_on(connection, call)
            except BaseException:
                connection.close()
                raise
        except (ConnectionError, http.client.HTTPException) as error:
            raise failed(self._base_url, error, was_broken=True) from error
        except OSError as error:
            raise failed(self._base_url, error, was_broken=False) from error
        if is_kept:
            self._idle.keep(connection)
        else:
            connection.close()
        return reply

    def close(self) -> None:
        """Closes the connections that are idle."""
        self._idle.close()

    def _connection(self, timeout_s: float | None) -> socket.socket:
        connection = self._idle.take()
        if connection is None:
            connection = socket.create_connection(self._writer.address, timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif connection.gettimeout() != timeout_s:
            connection.settimeout(timeout_s)
        return connection

    def _exchange_on(self, connection: socket.socket, call: Call) -> tuple[Reply, bool]:
        broken: OSError | None = None
        try:
            _send(connection, self._writer.head_of(call), call)
        except ConnectionError as error:
            # A server may refuse a body and close before all of it was sent: its answer is there to read.
            broken = error
        reading = read_answer(call)
        try:
            space = next(reading)
            while True:
                space = reading.send(connection.recv_into(space))
        except StopIteration as done:
            reply, is_kept = done.value
        except (ConnectionError, http.client.HTTPException) as error:
            if broken is None:
                raise
            raise broken from error
        return reply, is_kept and broken is None


def is_readable(connection: socket.socket) -> bool:
    """Whether an idle connection has something to read: its end or an error, for nothing else comes unasked."""
    timeout_s = connection.gettimeout()
    # Not by `select`: Windows lacks `poll`, a selector is a descriptor more, and select(2) takes small descriptors alone.
    connection.settimeout(0)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(timeout_s)
    return True


def _send(connection: socket.socket, head: bytes, call: Call) -> None:
    views = deque(view for part in (head, *call.parts) if (view := memoryview(part).cast("B")).nbytes)
    total = call.num_body_bytes
    sent = -len(head)
    while views:
        # With a progress function no write is so long that it stands still.
        step = [view[:STEP_BYTES] for view in list(views)[:2]] if call.progress else list(views)[:_MAX_VIEWS]
        count = connection.sendmsg(step) if _IS_VECTORED else connection.send(step[0])
        sent += count
        while views and count >= views[0].nbytes:
            count -= views.popleft().nbytes
        if count:
            views[0] = views[0][count:]
        if call.progress is not None and sent > 0:
            call.progress(sent, total)
