"""One request's side of a connection of ours: its body comes in by it, and its answer leaves by it.

Stands where uvicorn has its cycle of request and response. Ops use it as `context.Stream`; routes of frameworks use it
through ASGI, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

from tilewire.service.errors import ClientGone, InvalidRequest
from tilewire.service.gateway.connection.receive import Owner, SlotReceiver
from tilewire.service.gateway.connection.write import CoalescingTransport, write_answer

logger = logging.getLogger(__name__)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_SCOPE: Mapping[str, Any] = {}


class StreamOwner(Owner, Protocol):
    """The connection of a stream; `connection.protocol` implements it.

    Attributes:
        loop: Event loop.
        server_state: Headers of every answer, and running tasks.
        access_logger: Uvicorn's.
        logger: Uvicorn's.
        on_gone: Called once when the client leaves.
        patience_s: Longest time without a byte of a body that is discarded.
    """

    loop: asyncio.AbstractEventLoop
    server_state: ServerState
    logger: logging.Logger
    access_logger: logging.Logger
    flow: FlowControl
    on_gone: Callable[[], None] | None
    patience_s: float

    def default_lines(self) -> bytes: ...
    def on_response_complete(self) -> None: ...
    def take_back(self, stream: RequestStream, *, is_complete: bool) -> None: ...
    def release(self, stream: RequestStream) -> None: ...
    def linger(self) -> None: ...
    def stop_body_timer(self) -> None: ...


class RequestStream(RequestResponseCycle):
    """See the module, and `context.Stream` for the calls.

    Args:
        owner: Connection.
        is_head_only: The answer has no body.
        is_http11: The client understands interim responses.
        keep_alive: The connection stays behind the answer.
        expects_continue: The client waits for `100 Continue` before it sends its body.
        unparsed: Received bytes of a body that bypasses the parser; None when the parser has it.
        content_length: Length of a body that never goes through the parser.
    """

    def __init__(
        self,
        owner: StreamOwner,
        *,
        is_head_only: bool = False,
        is_http11: bool = True,
        keep_alive: bool = True,
        expects_continue: bool = False,
        unparsed: memoryview | None = None,
        content_length: int = 0,
    ) -> None:
        # Not uvicorn's constructor: a request of an op needs neither a scope nor a transport of its own.
        self._owner = owner
        self.flow = owner.flow
        self.is_head_only = is_head_only
        self.is_http11 = is_http11
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects_continue
        self.body = bytearray()
        self.message_event = asyncio.Event()
        self.disconnected = self.response_started = self.response_complete = False
        self.received_bytes = 0
        self._unparsed = unparsed
        # Bytes of a body that the parser does not know of, and that are still in the socket.
        self._owed = 0 if unparsed is None else content_length - len(unparsed)
        self.more_body = unparsed is None or self._owed > 0

    def open_asgi(self, scope: Any) -> None:
        """Prepares for a framework's route."""
        owner = self._owner
        self.scope = scope
        self.transport = CoalescingTransport(owner.transport, self)  # type: ignore[assignment]
        self.logger = owner.logger
        self.access_logger = owner.access_logger
        self.access_log = False
        self.default_headers = owner.server_state.default_headers
        self.on_response = owner.on_response_complete
        self.chunked_encoding = None
        self.expected_content_length = 0

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs what answers the request, as a task of its own."""
        owner = self._owner
        tasks = owner.server_state.tasks
        task = owner.loop.create_task(self._run(work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("an answer was broken off")
            self._owner.transport.abort()
        self.response_complete = True
        self._owner.release(self)

    @property
    def is_complete(self) -> bool:
        """Whether the last byte of the body is in."""
        return not self.more_body

    @property
    def is_disconnected(self) -> bool:
        """Whether the client left."""
        return self.disconnected or self._owner.transport.is_closing()

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` once if the client leaves before `unwatch`."""
        if self._owner.transport.is_closing():
            on_gone()
        else:
            self._owner.on_gone = on_gone

    def unwatch(self) -> None:
        """Ends the watch."""
        self._owner.on_gone = None

    async def receive_into(self, slot: memoryview, timeout_s: float) -> None:
        """Receives a body of declared length into a slot."""
        self._send_continue()
        if self._unparsed is not None:
            begun = self.received_bytes = len(self._unparsed)
            slot[:begun] = self._unparsed
            self._unparsed = memoryview(b"")
        else:
            # What came with the head went through the parser.
            begun = self.received_bytes = len(self.body)
            slot[:begun] = self.body
            self.body = bytearray()
        if begun == slot.nbytes:
            return
        if not self.more_body:
            # The rest of the slot holds what others sent before.
            raise InvalidRequest(f"body: {begun} bytes came of the {slot.nbytes} that were declared")
        await self._receive_rest(slot[begun:], begun, timeout_s)

    async def _receive_rest(self, rest: memoryview, begun: int, timeout_s: float) -> None:
        owner = self._owner
        if self.is_disconnected:
            raise ClientGone(f"the client left after {begun} bytes of its body")
        receiver = SlotReceiver(owner, rest, begun, timeout_s)
        owner.stop_body_timer()
        owner.transport.set_protocol(receiver)
        owner.flow.resume_reading()
        try:
            await receiver.done
        finally:
            receiver.stop()
            self._owed = 0
            self.received_bytes = receiver.received
            owner.take_back(self, is_complete=receiver.is_complete)
            # An error that it holds leads back to this frame: left here, both would wait for the garbage collector.
            del receiver

    async def receive_piece(self) -> bytes:
        """Receives a piece of a chunked body."""
        self._send_continue()
        while not self.body and self.more_body and not self.is_disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        piece, self.body = bytes(self.body), bytearray()
        self.received_bytes += len(piece)
        return piece

    def _send_continue(self) -> None:
        if self.waiting_for_100_continue:
            self.waiting_for_100_continue = False
            if not self._owner.transport.is_closing():
                self._owner.transport.write(CONTINUE)

    async def respond(self, status: int, lines: str, chunks: Sequence[bytes | memoryview], *, closes: bool) -> None:
        """Writes a whole answer; returns when no chunk is needed any more."""
        owner = self._owner
        if self.flow.write_paused and not self.is_disconnected:
            await self.flow.drain()
        if self.is_disconnected:
            return
        self.response_started = True
        if closes:
            self.keep_alive = False
        await write_answer(
            owner,
            (
                STATUS_LINE[status],
                owner.default_lines(),
                lines.encode("latin-1"),
                b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n",
            ),
            () if self.is_head_only else chunks,
        )
        self._end_response()

    def _end_response(self) -> None:
        owner = self._owner
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            if self.more_body and not self.waiting_for_100_continue:
                # Closing with bytes unread would reset the connection, and the client would lose the answer.
                owner.linger()
            else:
                owner.transport.close()
        elif self._owed:
            self._discard_rest()
            return
        owner.on_response_complete()

    def _discard_rest(self) -> None:
        """Takes what is left of a refused body, which the parser does not know of, before the next request is read."""
        receiver = SlotReceiver(self._owner, memoryview(bytearray(self._owed)), 0, self._owner.patience_s)
        self._owner.transport.set_protocol(receiver)
        # Nothing was read while no slot was there for it.
        self._owner.flow.resume_reading()
        receiver.done.add_done_callback(lambda done: self._on_discarded(receiver, done))

    def _on_discarded(self, receiver: SlotReceiver, done: asyncio.Future[None]) -> None:
        receiver.stop()
        self._owed = 0
        if done.exception() is None:
            self._owner.take_back(self, is_complete=True)
            self._owner.on_response_complete()
        else:
            self._owner.transport.close()
