"""Receives the bytes of a connection: bodies of known length straight into their slots, all else into scratch memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from tilewire.service.errors import ClientGone, InvalidRequest, TilewireError
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.request.body import cut_short, stalled, too_slow

# Heads with small bodies come in one read; the rest of a larger body goes straight into its slot.
SCRATCH_BYTES = 2**16
# From here the rest of a body is read by as many calls as the client keeps up with. The loop's own way from one read to
# another takes a quarter of the time of a fast connection. After so many bytes the loop has its turn; a single call, too, would
# take all that a fast client sends meanwhile.
DIRECT_BYTES = 2**20
TURN_BYTES = 2**23

_NOTHING = memoryview(b"")


class Connection(Protocol):
    """One connection, as its parts see it; `connection.protocol` implements it.

    Attributes:
        loop: Event loop.
        transport: Transport of the connection.
        flow: Whether reading and writing are paused.
        fd: Descriptor of the socket; -1 where bytes go through TLS.
        receiver: Reading side.
        client_flow: Flow of the client's address.
        server_state: Running tasks.
        on_gone: Called once when the client leaves.
        timeout_s: Longest time for a head to come. Also the longest without a byte of a discarded body, and without a
            read of the answer by the client.
        timeout_keep_alive: Longest time without a request, in seconds.
        min_body_bytes_per_s: Least rate of a body that takes long.
        max_body_s: Longest time for a body at that rate: a longer body has a larger least rate.
        is_busy: A request is under way.
        takes_interim: An interim response may be written now.
        was_cut: It was lost while something of an answer had not left, or its client has refused an answer.
    """

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: FlowControl
    fd: int
    receiver: Receiver
    client_flow: Flow
    server_state: ServerState
    on_gone: Callable[[], object] | None
    timeout_s: float
    timeout_keep_alive: int
    min_body_bytes_per_s: int
    max_body_s: float

    @property
    def is_busy(self) -> bool: ...
    @property
    def takes_interim(self) -> bool: ...
    @property
    def was_cut(self) -> bool: ...

    def feed(self, data: memoryview, nbytes: int) -> None: ...
    def begin_body(self) -> None: ...
    def end_body(self, *, is_complete: bool) -> None: ...
    def eof_received(self) -> bool: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def send_400_response(self, msg: str) -> None: ...
    def default_lines(self) -> bytes: ...
    def on_response_complete(self) -> None: ...
    def release(self, stream: object) -> None: ...
    def linger(self) -> None: ...
    def check_gone(self) -> None: ...


class Receiver(asyncio.BufferedProtocol):
    """The reading side of one connection, from its first byte to its last.

    Args:
        connection: Connection.
        scratch: Memory for what is not received into a slot; connections share it, as each chunk is used up at once.

    Attributes:
        received_bytes: Bytes of the last body that have come.
    """

    def __init__(self, connection: Connection, scratch: memoryview) -> None:
        self._connection: Connection | None = connection
        self._scratch = scratch
        self._rest = _NOTHING
        self._body: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s = self._began_s = self._checked_s = 0.0
        self._min_bytes_per_s = self._checked_bytes = 0
        self.received_bytes = 0

    def receive_body(self, rest: memoryview, begun: int, timeout_s: float) -> asyncio.Future[None]:
        """Receives the rest of a body.

        Args:
            rest: Memory that is still to be filled; not empty.
            begun: Bytes of the body that came before.
            timeout_s: Longest time without a byte; from then on the body must have come at the connection's least rate,
                which grows with its length.

        Returns:
            A future that ends with the body, or with the error of the tree that says why it will not come.
        """
        connection = self._connection
        assert connection is not None, "This is a bug."
        connection.begin_body()
        self._body = body = connection.loop.create_future()
        self._rest = rest
        self._timeout_s = timeout_s
        self._min_bytes_per_s = max(connection.min_body_bytes_per_s, int((begun + rest.nbytes) / connection.max_body_s))
        self._began_s = self._checked_s = connection.loop.time()
        self.received_bytes = self._checked_bytes = begun
        if self._timer is None:
            self._timer = connection.loop.call_later(timeout_s, self._check_progress)
        connection.flow.resume_reading()
        return body

    def stop_body(self) -> None:
        """Gives up what has not come of a body."""
        if self._body is not None:
            self._end_body(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Asyncio's call: where the next bytes go. Never past a body, so the next request stays in the socket."""
        return self._scratch if self._body is None else self._rest[:TURN_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Asyncio's call: bytes came."""
        connection = self._connection
        assert connection is not None, "This is a bug."
        if self._body is None:
            connection.feed(self._scratch, nbytes)
            return
        self._rest = self._rest[nbytes:]
        self.received_bytes += nbytes
        if connection.fd >= 0 and self._rest.nbytes >= DIRECT_BYTES:
            self._read_on(connection.fd)
        if not self._rest.nbytes:
            self._end_body(None)

    def _read_on(self, fd: int) -> None:
        """Takes what has come meanwhile. The end of the connection, and errors, are left for the loop to find."""
        stop = self.received_bytes + TURN_BYTES
        with contextlib.suppress(OSError):
            while space := self._rest[: stop - self.received_bytes]:
                if not (nbytes := os.readv(fd, (space,))):
                    break
                self._rest = self._rest[nbytes:]
                self.received_bytes += nbytes

    def eof_received(self) -> bool:
        """Asyncio's call: the client sends nothing more, so half a body is all that there will ever be."""
        connection = self._connection
        stays = connection is not None and connection.eof_received()
        if stays and self._body is not None:
            self._end_body(InvalidRequest(cut_short(self.received_bytes)))
        return stays

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's call: the client left."""
        connection, self._connection = self._connection, None
        if self._timer is not None:
            self._timer.cancel()
        if self._body is not None:
            body, self._body, self._rest = self._body, None, _NOTHING
            _resolve(body, ClientGone(f"the client left after {self.received_bytes} bytes of its body"))
        if connection is not None:
            connection.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.resume_writing()

    def _check_progress(self) -> None:
        """The time is up, perhaps that of an earlier body: one timer serves many bodies."""
        self._timer = None
        if self._body is None or self._connection is None:
            return
        loop = self._connection.loop
        now_s = loop.time()
        due_s = self._checked_s + self._timeout_s
        if now_s >= due_s:
            if self.received_bytes == self._checked_bytes:
                self._end_body(InvalidRequest(stalled(self._timeout_s, self.received_bytes)))
                return
            if self.received_bytes < self._min_bytes_per_s * (now_s - self._began_s):
                self._end_body(InvalidRequest(too_slow(self._min_bytes_per_s, self.received_bytes)))
                return
            self._checked_s, self._checked_bytes, due_s = now_s, self.received_bytes, now_s + self._timeout_s
        self._timer = loop.call_at(due_s, self._check_progress)

    def _end_body(self, error: TilewireError | None) -> None:
        body, is_complete = self._body, not self._rest.nbytes
        assert body is not None, "This is a bug."
        assert self._connection is not None, "This is a bug."
        self._body, self._rest = None, _NOTHING
        # At once: the next bytes are the next request's.
        self._connection.end_body(is_complete=is_complete)
        _resolve(body, error)


def _resolve(body: asyncio.Future[None], error: TilewireError | None) -> None:
    if body.done():
        return
    if error is None:
        body.set_result(None)
    else:
        body.set_exception(error)
