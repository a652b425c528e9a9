"""One request's side of a connection of ours: its body comes in by it, and its answer leaves by it.

Stands where uvicorn has its cycle of request and response. Ops and routes of frameworks use it as `context.Stream`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tilewire.service.errors import ClientGone, InvalidRequest
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.connection.driving import Driven
from tilewire.service.gateway.connection.limits import FIRST_PROBE_S
from tilewire.service.gateway.connection.receive import Connection
from tilewire.service.gateway.connection.write import write_answer
from tilewire.service.gateway.request.body import cut_short, stalled

if TYPE_CHECKING:
    from tilewire.service.gateway.request.context import RequestContext

logger = logging.getLogger(__name__)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NOTHING = memoryview(b"")


class RequestStream(Driven):
    """Receives one request's body and sends its answer; `context.Stream` describes the calls.

    Args:
        owner: Connection.
        content_length: Length of a body that bypasses the parser; None when the parser has it.
        unparsed: Bytes of such a body that have come, in memory that the next read uses again.
    """

    # In the class: an assignment would be a part of what every request costs.
    refusal: RequestContext | None = None

    def __init__(self, owner: Connection, content_length: int | None = None, unparsed: memoryview = _NOTHING) -> None:
        self._owner = owner
        self.flow = owner.flow
        self.is_http11 = self.keep_alive = True
        self.is_head_only = self.waiting_for_100_continue = self._is_asked = False
        self._is_stalled = False
        # Why the rest of the body does not come.
        self._broken: str | None = None
        self.disconnected = self.response_started = self.response_complete = False
        self.received_bytes = 0
        self._event: asyncio.Event | None = None
        self.body: Any = bytearray() if content_length is None else unparsed
        # Bytes of a body that bypass the parser, and are still in the socket.
        self._owed = 0 if content_length is None else content_length - len(unparsed)
        self.more_body = content_length is None or self._owed > 0

    @property
    def message_event(self) -> asyncio.Event:
        """Set when a piece of the body came, or the client left."""
        if self._event is None:
            self._event = asyncio.Event()
        return self._event

    def notify(self) -> None:
        """Wakes whoever waits for a piece of the body."""
        if self._event is not None:
            self._event.set()

    def break_body(self, detail: str | None = None) -> None:
        """What is missing of the body does not come, for this reason; None when the client has ended its side."""
        self.keep_alive, self._broken = False, detail or cut_short(self.received_bytes + len(self.body))
        self.notify()

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a framework's route, as a task of asyncio."""
        tasks = self._owner.server_state.tasks
        task = self._owner.loop.create_task(self._run(work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  (it is logged)
            self._break_off(error)
        finally:
            self._end()

    def start(self, work: Coroutine[Any, Any, None] | None) -> None:
        """Runs what answers an op, without a task; None when it is answered."""
        self.drive(work)
        if self.is_waiting:
            # Uvicorn waits for these when it ends, and cancels them when that takes too long.
            self._owner.server_state.tasks.add(self)  # type: ignore[arg-type]
            if not self._is_asked:
                self._keep_body()

    def ended(self, error: Exception | None) -> None:
        """Breaks the answer off after an error, and ends the request."""
        if error is not None:
            self._break_off(error)
        if self.is_waiting:
            self._owner.server_state.tasks.discard(self)
        self._end()

    def _break_off(self, error: Exception) -> None:
        logger.error("an answer was broken off", exc_info=error)
        self._owner.transport.abort()

    def _end(self) -> None:
        self.response_complete = True
        self._owner.release(self)

    def _keep_body(self) -> None:
        """Copies what has come of a body for which there is no slot yet, as the next read uses the memory again."""
        if isinstance(self.body, bytearray):
            return
        self.body = bytes(self.body)
        if self._owed:
            self.flow.pause_reading()

    @property
    def client_flow(self) -> Flow:
        return self._owner.client_flow

    @property
    def is_complete(self) -> bool:
        return not self.more_body

    @property
    def is_disconnected(self) -> bool:
        return self.disconnected or self._owner.transport.is_closing()

    @property
    def is_cut(self) -> bool:
        return self._owner.was_cut

    def watch(self, on_gone: Callable[[], object]) -> None:
        if self._owner.transport.is_closing():
            on_gone()
        else:
            self._owner.on_gone = on_gone

    def unwatch(self) -> None:
        self._owner.on_gone = None

    def receive_into(self, slot: memoryview, timeout_s: float) -> Awaitable[None] | None:
        if self.waiting_for_100_continue:
            self._send_continue()
        self._is_asked = True
        # Bytes that came with the head.
        begun = self.received_bytes = len(self.body)
        slot[:begun] = self.body
        self.body = bytearray()
        if begun == slot.nbytes:
            return None
        return self._receive_rest(slot[begun:], begun, timeout_s)

    async def _receive_rest(self, rest: memoryview, begun: int, timeout_s: float) -> None:
        owner = self._owner
        if not self.more_body:
            # The rest of the slot holds what others sent before.
            raise InvalidRequest(f"body: {begun} bytes came of the {begun + rest.nbytes} that were declared")
        if self.is_disconnected:
            raise ClientGone(f"the client left after {begun} bytes of its body")
        if self._broken is not None:
            raise InvalidRequest(self._broken)
        try:
            # An error that the future holds leads back to this frame, so that the frame must not hold the future.
            await owner.receiver.receive_body(rest, begun, timeout_s)
        finally:
            owner.receiver.stop_body()
            self._owed = 0
            self.received_bytes = owner.receiver.received_bytes

    async def receive_piece(self, timeout_s: float) -> bytes:
        self._send_continue()
        timer = self._owner.loop.call_later(timeout_s, self._stall)
        try:
            while not self.body and self.more_body and not self.is_disconnected and not self.response_complete:
                if self._is_stalled:
                    raise InvalidRequest(stalled(timeout_s, self.received_bytes))
                if self._broken is not None:
                    raise InvalidRequest(self._broken)
                self.flow.resume_reading()
                await self.message_event.wait()
                self.message_event.clear()
        finally:
            timer.cancel()
        piece, self.body = bytes(self.body), bytearray()
        self.received_bytes += len(piece)
        return piece

    def _stall(self) -> None:
        self._is_stalled = True
        self.notify()

    def _send_continue(self) -> None:
        if self.waiting_for_100_continue:
            self.waiting_for_100_continue = False
            if not self._owner.transport.is_closing():
                self._owner.transport.write(CONTINUE)

    def respond(
        self, status: int, lines: str, chunks: Sequence[bytes | memoryview], closes: bool
    ) -> Awaitable[None] | None:
        owner = self._owner
        if self.disconnected or owner.transport.is_closing():
            return None
        if owner.flow.write_paused:
            return self._respond_later(status, lines, chunks, closes)
        self.response_started = True
        if closes or (self.waiting_for_100_continue and self.more_body):
            # A client that waits for the interim response may send its body behind this answer, or not.
            self.keep_alive = False
        end = "\r\n" if self.keep_alive else "connection: close\r\n\r\n"
        head = b"".join((STATUS_LINE[status], owner.default_lines(), f"{lines}{end}".encode("latin-1")))
        written = write_answer(owner, head, () if self.is_head_only else chunks)
        if self._broken is not None:
            written = self._see_taken(written)
        if written is not None:
            return self._end_later(written)
        if self.keep_alive and not self._owed:
            self.response_complete = True
            owner.on_response_complete()
        else:
            self._end_response()
        return None

    async def _respond_later(self, status: int, lines: str, chunks: Sequence[bytes | memoryview], closes: bool) -> None:
        await self.flow.drain()
        written = self.respond(status, lines, chunks, closes)
        if written is not None:
            await written

    async def _end_later(self, written: Awaitable[None]) -> None:
        await written
        self._end_response()

    async def _see_taken(self, written: Awaitable[None] | None) -> None:
        """Waits until an answer to half a body has left, and whether its client takes it: one that has left refuses it."""
        if written is not None:
            await written
        await asyncio.sleep(FIRST_PROBE_S)
        self._owner.check_gone()

    def _end_response(self) -> None:
        owner = self._owner
        self.response_complete = True
        if not self.keep_alive:
            if self.more_body:
                # Closing with bytes unread would reset the connection, and the client would lose the answer.
                owner.linger()
            else:
                owner.transport.close()
        elif self._owed:
            # Takes what is left of a refused body, which bypasses the parser, before the next request is read.
            rest = memoryview(bytearray(self._owed))
            owner.receiver.receive_body(rest, 0, owner.timeout_s).add_done_callback(self._on_discarded)
        owner.on_response_complete()

    def _on_discarded(self, body: asyncio.Future[None]) -> None:
        if body.exception() is not None:
            self._owner.transport.close()
