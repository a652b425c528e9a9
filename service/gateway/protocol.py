"""uvicorn's HTTP/1.1 protocol, with what a tensor server needs from its connections.

Owns four changes: the application can wait until what it wrote has left, and hear at once when the client does (see
`context.Connection`); errors of the parser are answered as problem details; heads are bounded in size and time, and a client
that does not read its answer loses its connection; and a drain gives idle connections a moment, so that a request that was
already on its way is answered rather than reset.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from urllib.parse import unquote_to_bytes

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.errors import ClientGone, InvalidRequest, TilewireError
from service.gateway.answers import LINGER_S, is_oip
from service.gateway.body import stalled
from service.gateway.context import CONNECTION

DRAIN_GRACE_S = 0.5

TLS_PIECE_BYTES = 2**18

# Request line and headers together; httptools has no bound of its own.
MAX_HEAD_BYTES = 2**16


class SlotReceiver(asyncio.BufferedProtocol):
    """Receives the rest of one body straight into a slot, then gives the connection back.

    Args:
        protocol: Whose connection it is.
        rest: The part of the slot that is still to be filled; not empty.
        begun: Bytes of the body that came before.
        timeout_s: Longest time without a byte.
    """

    def __init__(self, protocol: TilewireProtocol, rest: memoryview, begun: int, timeout_s: float) -> None:
        self._protocol = protocol
        self._rest = rest
        self._received = begun
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._received_before = begun
        self._timer = self._loop.call_later(timeout_s, self._check_progress)
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.is_complete = False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Asyncio's call: where the next bytes go. Never past the body, so the next request stays in the socket."""
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        """Asyncio's call: bytes came."""
        self._rest = self._rest[nbytes:]
        self._received += nbytes
        if not self._rest.nbytes:
            self.is_complete = True
            # Nothing more is read until the connection is given back.
            self._protocol.flow.pause_reading()
            self._end(None)

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

    def _check_progress(self) -> None:
        if self._received == self._received_before:
            self._end(InvalidRequest(stalled(self._timeout_s, self._received)))
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


class RequestConnection:
    """One request's side of its connection; see `context.Connection` for the calls.

    Args:
        protocol: Of the connection.
        cycle: Of the request.
    """

    def __init__(self, protocol: TilewireProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

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
        begun = len(cycle.body)
        slot[:begun] = cycle.body
        cycle.body = bytearray()
        if cycle.more_body and begun < slot.nbytes:
            await self._receive_rest(slot[begun:], begun, timeout_s)

    async def _receive_rest(self, rest: memoryview, begun: int, timeout_s: float) -> None:
        if self._cycle.disconnected or self._protocol.transport.is_closing():
            raise ClientGone(f"the client left after {begun} bytes of its body")
        receiver = SlotReceiver(self._protocol, rest, begun, timeout_s)
        self._protocol.transport.set_protocol(receiver)
        self._protocol.flow.resume_reading()
        try:
            await receiver.done
        finally:
            receiver.stop()
            self._protocol.take_back(is_complete=receiver.is_complete)

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


class TilewireProtocol(HttpToolsProtocol):
    """One connection.

    Attributes:
        patience_s: Longest time for a head to come, and longest time in which a client reads nothing of its answer.
    """

    patience_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        self.on_gone: Callable[[], None] | None = None
        # What an error is answered like, before any request line was read.
        self.url = b""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._is_in_head, self._head_bytes = True, 0
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._is_refused:
            return
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head and not self._is_refused:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the request line and headers exceed {MAX_HEAD_BYTES} bytes")
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(self.patience_s, self._give_up_head)

    def on_headers_complete(self) -> None:
        """The head of a request is in."""
        nbytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if nbytes > MAX_HEAD_BYTES:
            raise ValueError(f"the request line and headers exceed {MAX_HEAD_BYTES} bytes")
        self._is_in_head, self._head_bytes = False, 0
        self._stop_head_timer()
        super().on_headers_complete()
        # Behind pipelined requests, the parser is ahead of the one that is being answered: each needs its own cycle.
        self.scope["extensions"] = {CONNECTION: RequestConnection(self, self.cycle)}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        """The last byte of a body is in."""
        self._is_in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP request, unless they stand behind one whose answer is still due."""
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or not self.cycle.more_body:
                # Nothing may come between the bytes of an answer that is under way; it is the last one.
                self.cycle.keep_alive = False
                return
            # The body itself is broken: nobody waits for what it would have given.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_bad_request(f"request: {msg}", self.url))
        # Closing with bytes unread would reset the connection, and the client would lose the answer. TLS has no half-close.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left."""
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()

    def take_back(self, *, is_complete: bool) -> None:
        """The connection is the parser's again, a fresh one: the old one still waits for the body."""
        if self.transport.is_closing():
            return
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.transport.set_protocol(self)
        # Read on: that is how a client that leaves while its request is computed is noticed.
        self.flow.resume_reading()
        self._is_in_head = True
        if is_complete:
            self.cycle.more_body = False
        else:
            # What still comes belongs to a body that nobody reads.
            self._is_refused = True
            self.cycle.keep_alive = False

    def pause_writing(self) -> None:
        """The client reads more slowly than we write: watch that it reads at all."""
        super().pause_writing()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.patience_s, self._check_reading)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._stop_write_timer()
        super().resume_writing()

    def _check_reading(self) -> None:
        """A client that reads nothing for so long would hold its slots for ever: it loses its connection."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes >= self._unsent_bytes:
            self.transport.abort()
            return
        self._unsent_bytes = unsent_bytes
        self._write_timer = self.loop.call_later(self.patience_s, self._check_reading)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _give_up_head(self) -> None:
        self._head_timer = None
        self.send_400_response(f"the request line and headers did not end within {self.patience_s:g} s")

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def shutdown(self) -> None:
        """The server drains: this request's answer is the last one; an idle connection is closed after a moment."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(DRAIN_GRACE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def _bad_request(detail: str, url: bytes) -> bytes:
    """An answer by hand, in the form that the path asks for as far as it was read."""
    request_id = uuid.uuid4().hex
    problem = {
        "type": "urn:tilewire:error:invalid_request",
        "title": "Invalid request",
        "status": 400,
        "detail": detail,
        "request_id": request_id,
    }
    is_protocol = is_oip(unquote_to_bytes(url.partition(b"?")[0]).decode("latin-1"))
    content_type = "application/json" if is_protocol else "application/problem+json"
    body = msgspec.json.encode({"error": detail} if is_protocol else problem)
    head = (
        f"HTTP/1.1 400 Bad Request\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
