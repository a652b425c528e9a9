"""Bounds on one connection: how long its heads, bodies, reads and pauses may take, and whether its client is still there.

Owns the timers. A timer that ends without reason to act is set again; none is touched for each request.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
import time
import weakref
from collections.abc import Callable
from typing import cast

from tilewire.service.gateway.auth.authenticator import HEALTH_PATHS
from tilewire.service.gateway.connection.receive import Connection
from tilewire.service.gateway.request.body import LINGER_S, stalled, too_slow

# Time in which an idle connection may still send a request once the gateway drains, in seconds.
DRAIN_GRACE_S = 0.5
# Longest time without a request of a connection above the limit, in seconds: a probe asks at once, and others hold descriptors.
EXCESS_IDLE_S = 1
# Request line and headers together, and trailers together, in bytes; httptools has no bound of its own.
MAX_HEAD_BYTES = 2**16
# Beside its name and its value, a line of either has a colon, a space and its end.
LINE_BYTES = 4

# Orchestrators are answered whatever the load: they would end a server that is merely busy.
PROBES = tuple(b"%b %b " % (verb, path.encode("ascii")) for verb in (b"GET", b"HEAD") for path in sorted(HEALTH_PATHS))

# Pauses between looks at whether a client that sends no more is still there, in seconds: short at first, then longer.
FIRST_PROBE_S, LAST_PROBE_S = 0.02, 2.0
# States of a connection that the other side has reset, or ended from its side.
TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8


class Limits:
    """The timers of one connection.

    Attributes:
        body_bytes: Bytes of the body that goes through the parser.
        idle_since_s: End of the last request, on the loop's clock.
    """

    def __init__(self, connection: Connection) -> None:
        # Weak: the connection holds this, and both would wait for the garbage collector.
        self._connection = cast("Connection", weakref.proxy(connection))
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.body_bytes = 0
        self.idle_since_s = connection.loop.time()
        # A client that never sends anything is idle from the start.
        self._set("idle", connection.timeout_keep_alive, self._check_idle)

    def _set(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        self._timers[name] = self._connection.loop.call_later(seconds, act)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def stop(self) -> None:
        """The connection is gone."""
        for name in list(self._timers):
            self._stop(name)

    def begin_head(self) -> None:
        """A part of a head is in."""
        if "head" not in self._timers:
            self._set("head", self._connection.timeout_s, self._give_up_head)

    def end_head(self) -> None:
        """A head is in."""
        if self._timers:
            self._stop("head")

    def _give_up_head(self) -> None:
        self._stop("head")
        connection = self._connection
        if connection.flow.read_paused:
            # It is we who do not read, until the requests before this one are answered.
            self.begin_head()
            return
        connection.send_400_response(f"the request line and headers did not end within {connection.timeout_s:g} s")

    def begin_body(self) -> None:
        """A part of a body went through the parser."""
        if "body" not in self._timers:
            self._await_body(time.monotonic())

    def end_body(self) -> None:
        """The body is in, or comes another way."""
        self.body_bytes = 0
        self._stop("body")

    def _await_body(self, began_s: float) -> None:
        seen_bytes = self.body_bytes
        self._set("body", self._connection.timeout_s, lambda: self._check_body(began_s, seen_bytes))

    def _check_body(self, began_s: float, seen_bytes: int) -> None:
        """Refuses a body that goes through the parser and stalls, is too slow, or takes longer than the longest time."""
        self._stop("body")
        connection = self._connection
        min_bytes_per_s, elapsed_s = connection.min_body_bytes_per_s, time.monotonic() - began_s
        if connection.flow.read_paused:
            # It is we who do not read.
            self.body_bytes, began_s = 0, time.monotonic()
        elif self.body_bytes == seen_bytes:
            connection.send_400_response(stalled(connection.timeout_s, self.body_bytes))
            return
        elif elapsed_s > connection.max_body_s or self.body_bytes < min_bytes_per_s * elapsed_s:
            connection.send_400_response(too_slow(min_bytes_per_s, self.body_bytes))
            return
        self._await_body(began_s)

    def begin_write(self) -> None:
        """The client reads more slowly than we write."""
        self._await_reading("write")

    def end_write(self) -> None:
        """The client reads again."""
        self._stop("write")

    def _await_reading(self, name: str) -> None:
        unread_bytes = self._count_unread()
        self._set(name, self._connection.timeout_s, lambda: self._check_reading(name, unread_bytes))

    def _check_reading(self, name: str, unread_bytes: int) -> None:
        """A client that reads nothing for so long would hold its slots for ever: it loses its connection."""
        if self._count_unread() >= unread_bytes:
            self._connection.transport.abort()
            return
        self._await_reading(name)

    def _count_unread(self) -> int:
        """Bytes that the client's system has not taken. Those that ours holds are some megabytes, and leave in lumps."""
        transport = self._connection.transport
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is None:
            return transport.get_write_buffer_size()
        held = int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return transport.get_write_buffer_size() + held

    def linger(self) -> None:
        """Closes after a moment, in which what comes is discarded."""
        if "linger" not in self._timers:
            self._set("linger", LINGER_S, self._connection.transport.close)

    def _check_idle(self) -> None:
        connection = self._connection
        transport, rest_s = connection.transport, float(connection.timeout_keep_alive)
        if not connection.is_busy:
            rest_s = self.idle_since_s + connection.timeout_keep_alive - connection.loop.time()
        if rest_s > 0 and not transport.is_closing():
            self._set("idle", rest_s, self._check_idle)
            return
        transport.close()
        if transport.get_write_buffer_size():
            # The rest of the last answer waits for the client, and may be too small for writing to be paused.
            self._await_reading("idle")

    @property
    def _tcp(self) -> socket.socket | None:
        """The socket, if it is one of TCP."""
        sock: socket.socket | None = self._connection.transport.get_extra_info("socket")
        return None if sock is None or sock.family == socket.AF_UNIX else sock

    def is_gone(self) -> bool:
        """Whether the client's system has refused what was written to it."""
        sock = self._tcp
        return sock is not None and tcp_state(sock) == TCP_CLOSE

    def probe(self, pause_s: float = FIRST_PROBE_S) -> None:
        """Sees whether a client that sends no more is still there, while nothing of its answer is written.

        Sends an interim response, which the system of a client that has left refuses.
        """
        connection = self._connection
        transport = connection.transport
        if transport.is_closing() or not connection.is_busy:
            return
        if self.is_gone():
            transport.abort()
            return
        if self._tcp is not None and connection.takes_interim:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._set("probe", pause_s, lambda: self.probe(min(2 * pause_s, LAST_PROBE_S)))


def tcp_state(sock: socket.socket) -> int:
    """Returns the state of a connection: `tcpi_state` in the first byte of TCP_INFO."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
