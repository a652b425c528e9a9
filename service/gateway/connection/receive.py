"""Receives one body from the socket straight into memory, and watches that it comes fast enough."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl

from tilewire.service.errors import ClientGone, InvalidRequest, TilewireError
from tilewire.service.gateway.request.body import stalled, too_slow

# From here the rest of a body is read by as many calls as the client keeps up with: the loop's own way from one read to another
# takes a quarter of the time of a fast connection. After so many bytes the loop has its turn.
DIRECT_BYTES = 2**20
TURN_BYTES = 2**23


class Owner(Protocol):
    """The connection that a receiver takes over for a while.

    Attributes:
        transport: Transport of the connection.
        flow: Whether reading and writing are paused.
        is_encrypted: Bytes come through TLS.
        min_body_bytes_per_s: Least rate of a body that takes long.
        max_body_s: Longest time for a body at that rate: a longer body has a larger least rate.
    """

    transport: asyncio.Transport
    flow: FlowControl
    min_body_bytes_per_s: int
    max_body_s: float

    @property
    def is_encrypted(self) -> bool: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class SlotReceiver(asyncio.BufferedProtocol):
    """Receives the rest of one body, then gives the connection back.

    Args:
        owner: Connection.
        rest: Memory that is still to be filled; not empty.
        begun: Bytes of the body that came before.
        timeout_s: Longest time without a byte; from then on the body must have come at the connection's least rate, which
            grows with its length.

    Attributes:
        done: Ends with the body, or with the error of the tree that says why it will not come.
        is_complete: All of it is in.
    """

    def __init__(self, owner: Owner, rest: memoryview, begun: int, timeout_s: float) -> None:
        self._owner = owner
        self._rest = rest
        self._received = begun
        self._timeout_s = timeout_s
        self._min_bytes_per_s = max(owner.min_body_bytes_per_s, int((begun + rest.nbytes) / owner.max_body_s))
        self._loop = asyncio.get_running_loop()
        self._received_before = begun
        self._began_s = time.monotonic()
        self._timer = self._loop.call_later(timeout_s, self._check_progress)
        self._direct = _own_socket(owner) if rest.nbytes >= DIRECT_BYTES else None
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.is_complete = False

    @property
    def received(self) -> int:
        """Bytes of the body that have come."""
        return self._received

    def get_buffer(self, sizehint: int) -> memoryview:
        """Asyncio's call: where the next bytes go. Never past the body, so the next request stays in the socket."""
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        """Asyncio's call: bytes came."""
        self._advance(nbytes)
        if self._direct is not None:
            self._read_on(self._direct)
        if not self._rest.nbytes:
            self.is_complete = True
            # Nothing more is read until the connection is given back.
            self._owner.flow.pause_reading()
            self._end(None)

    def _advance(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]
        self._received += nbytes

    def _read_on(self, direct: socket.socket) -> None:
        """Takes what has come meanwhile. The end of the connection, and errors, are left for the loop to find."""
        stop = self._received + TURN_BYTES
        with contextlib.suppress(OSError):
            while self._rest.nbytes and self._received < stop and (nbytes := direct.recv_into(self._rest)):
                self._advance(nbytes)

    def eof_received(self) -> bool:
        """Asyncio's call: the client sends nothing more, so half a body is all that there will ever be."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's call: the client left."""
        self._end(ClientGone(f"the client left after {self._received} bytes of its body"))
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Asyncio's call."""
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        """Asyncio's call."""
        self._owner.resume_writing()

    def stop(self) -> None:
        """Ends the watch over the time."""
        self._timer.cancel()
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    def _check_progress(self) -> None:
        if self._received == self._received_before:
            self._end(InvalidRequest(stalled(self._timeout_s, self._received)))
            return
        min_bytes_per_s = self._min_bytes_per_s
        if self._received < min_bytes_per_s * (time.monotonic() - self._began_s):
            self._end(InvalidRequest(f"body: {too_slow(min_bytes_per_s, self._received)}"))
            return
        self._received_before = self._received
        self._timer = self._loop.call_later(self._timeout_s, self._check_progress)

    def _end(self, error: TilewireError | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


def _own_socket(owner: Owner) -> socket.socket | None:
    """A descriptor of our own for the connection, which uvloop would not let us read; None where bytes come encrypted."""
    theirs: socket.socket | None = owner.transport.get_extra_info("socket")
    if owner.is_encrypted or theirs is None:
        return None
    own = socket.socket(theirs.family, theirs.type, fileno=os.dup(theirs.fileno()))
    own.setblocking(False)
    return own
