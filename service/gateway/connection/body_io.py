"""How one request's body comes in and its answer goes out on a connection of uvicorn: what `context.Connection` promises.

Owns the receiver that fills a slot from the socket, and the writes of an answer. Knows no parser and no limit on connections;
`gateway.connection.protocol` has those. Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tilewire.service.errors import ClientGone, InvalidRequest, TilewireError
from tilewire.service.gateway.request.body import stalled
from tilewire.service.gateway.request.habits import Habit

if TYPE_CHECKING:
    from tilewire.service.gateway.connection.protocol import TilewireProtocol

# Up to here, head and body of an answer are copied together and leave in one write.
JOINED_BYTES = 2**17

TLS_PIECE_BYTES = 2**18

# From here the rest of a body is read by as many calls as the client keeps up with: the loop's own way from one read to another
# takes a quarter of the time of a fast connection. After so many bytes the loop has its turn.
DIRECT_BYTES = 2**20
TURN_BYTES = 2**23


class SlotReceiver(asyncio.BufferedProtocol):
    """Receives the rest of one body straight into a slot, then gives the connection back.

    Args:
        protocol: Whose connection it is.
        rest: The part of the slot that is still to be filled; not empty.
        begun: Bytes of the body that came before.
        timeout_s: Longest time without a byte; from then on the body must have come at the least rate, which grows with its
            length (`max_body_s`).
    """

    def __init__(self, protocol: TilewireProtocol, rest: memoryview, begun: int, timeout_s: float) -> None:
        self._protocol = protocol
        self._rest = rest
        self._received = begun
        self._timeout_s = timeout_s
        self._least_bytes_per_s = max(protocol.min_body_bytes_per_s, int((begun + rest.nbytes) / protocol.max_body_s))
        self._loop = asyncio.get_running_loop()
        self._received_before = begun
        self._began_s = time.monotonic()
        self._timer = self._loop.call_later(timeout_s, self._check_progress)
        self._direct = _own_socket(protocol) if rest.nbytes >= DIRECT_BYTES else None
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
            self._protocol.flow.pause_reading()
            self._end(None)

    def _advance(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]
        self._received += nbytes

    def _read_on(self, direct: socket.socket) -> None:
        """Takes what has come meanwhile. The end of the connection, and errors, are left for the loop to find."""
        most = self._received + TURN_BYTES
        with contextlib.suppress(OSError):
            while self._rest.nbytes and self._received < most and (nbytes := direct.recv_into(self._rest)):
                self._advance(nbytes)

    def eof_received(self) -> bool:
        """Asyncio's call: the client sends nothing more, so half a body is all that there will ever be."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's call: the client left."""
        self._end(ClientGone(f"the client left after {self._received} bytes of its body"))
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Asyncio's call."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Asyncio's call."""
        self._protocol.resume_writing()

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
        least = self._least_bytes_per_s
        if self._received < least * (time.monotonic() - self._began_s):
            self._end(InvalidRequest(f"body: {too_slow(least, self._received)}"))
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


def _own_socket(protocol: TilewireProtocol) -> socket.socket | None:
    """A descriptor of our own for the connection, which uvloop would not let us read; None where bytes come encrypted."""
    theirs: socket.socket | None = protocol.transport.get_extra_info("socket")
    if protocol.scheme != "http" or theirs is None:
        return None
    own = socket.socket(theirs.family, theirs.type, fileno=os.dup(theirs.fileno()))
    own.setblocking(False)
    return own


class RequestConnection:
    """One request's side of its connection; see `context.Connection` for the calls.

    Args:
        protocol: Of the connection.
        cycle: Of the request.
        repeated_head: See `context.Connection`.
    """

    def __init__(self, protocol: TilewireProtocol, cycle: RequestResponseCycle, repeated_head: bytes = b"") -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.repeated_head = repeated_head
        self.received_bytes = 0

    def remember(self, habit: Habit) -> None:
        """See `context.Connection`."""
        self._protocol.remember(habit)

    def watch(self, on_gone: Callable[[], None]) -> None:
        """See `context.Connection`."""
        if self._protocol.transport.is_closing():
            on_gone()
        else:
            self._protocol.on_gone = on_gone

    def unwatch(self) -> None:
        """See `context.Connection`."""
        self._protocol.on_gone = None

    @property
    def can_receive_into(self) -> bool:
        """See `context.Connection`; also through TLS, which then decrypts into the slot."""
        return True

    async def receive_into(self, slot: memoryview, timeout_s: float) -> None:
        """See `context.Connection`."""
        cycle = self._cycle
        if cycle.waiting_for_100_continue and not self._protocol.transport.is_closing():
            self._protocol.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        # What came with the head went through the parser.
        begun = self.received_bytes = len(cycle.body)
        slot[:begun] = cycle.body
        cycle.body = bytearray()
        if begun == slot.nbytes:
            return
        if not cycle.more_body:
            # The rest of the slot holds what others sent before.
            raise InvalidRequest(f"body: {begun} bytes came of the {slot.nbytes} that were declared")
        await self._receive_rest(slot[begun:], begun, timeout_s)

    async def _receive_rest(self, rest: memoryview, begun: int, timeout_s: float) -> None:
        if self._cycle.disconnected or self._protocol.transport.is_closing():
            raise ClientGone(f"the client left after {begun} bytes of its body")
        receiver = SlotReceiver(self._protocol, rest, begun, timeout_s)
        self._protocol.stop_body_timer()
        self._protocol.transport.set_protocol(receiver)
        self._protocol.flow.resume_reading()
        try:
            await receiver.done
        finally:
            receiver.stop()
            self.received_bytes = receiver.received
            self._protocol.take_back(is_complete=receiver.is_complete)
            # An error that it holds leads back to this frame: left here, both would wait for the garbage collector.
            del receiver

    def pieces(self, chunk: bytes | memoryview) -> Iterable[bytes | memoryview]:
        """See `context.Connection`: what is written at once is encrypted at once, and nobody else is served meanwhile."""
        if self._protocol.scheme == "http":
            return (chunk,)
        return (chunk[at : at + TLS_PIECE_BYTES] for at in range(0, len(chunk), TLS_PIECE_BYTES))

    async def flushed(self) -> None:
        """See `context.Connection`."""
        transport = self._protocol.transport
        if transport.is_closing() or not transport.get_write_buffer_size():
            return
        # Without room for buffering, the transport says that it is writable only when its buffer is empty.
        transport.set_write_buffer_limits(high=0)
        await self._protocol.flow.drain()
        if not transport.is_closing():
            transport.set_write_buffer_limits()


class JoinedWrites:
    """A connection's transport, for one answer: its head waits for the first bytes of its body, and both leave in one write.

    Without it each would be a call to the system, and the client would wake twice. A head whose body may come much later, in
    chunks, or not at all, does not wait.

    Args:
        transport: The connection's own.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        # The cycle has this for its transport: weak, or both would wait for the garbage collector if nothing is ever answered.
        self._cycle: weakref.ref[RequestResponseCycle] | None = None

    def follow(self, cycle: RequestResponseCycle) -> None:
        """Whose answer it is."""
        self._cycle = weakref.ref(cycle)

    def write(self, data: bytes | memoryview) -> None:
        """Uvicorn's call: the head, or a piece of the body."""
        cycle = self._cycle() if self._cycle is not None else None
        if cycle is not None:
            # The first write after the answer began is its head; one before that is a `100 Continue`.
            if cycle.response_started:
                self._cycle = None
                if cycle.expected_content_length > 0 and cycle.scope["method"] != "HEAD":
                    self._head = bytes(data)
                    return
        elif self._head:
            head, self._head = self._head, b""
            if len(data) <= JOINED_BYTES:
                data = b"".join((head, data))
            else:
                self._transport.write(head)
        self._transport.write(data)

    def close(self) -> None:
        """Uvicorn's call: the last answer is written, or there will be none."""
        if self._head:
            self._transport.write(self._head)
            self._head = b""
        self._transport.close()

    def is_closing(self) -> bool:
        """Uvicorn's call."""
        return self._transport.is_closing()


def too_slow(least_bytes_per_s: int, received: int) -> str:
    """The detail of a body that trickles in."""
    return f"{received} bytes had come, slower than {least_bytes_per_s} bytes/s; the request was given up"
