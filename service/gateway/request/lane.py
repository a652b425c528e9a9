"""A short way through the gateway for a request that repeats one of the last on its connection (`gateway.request.habits`).

Owns such a request from its bytes to those of its answer: without parser, task, ASGI or middleware, but past the same
doors and into the same reports. It takes only what the ordinary path would surely answer, and looks before anything is
changed; whatever else comes, and whatever turns out to need planning again, goes the ordinary way. Knows no format. Runs
in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Never

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tilewire.service.errors import ClientGone, TilewireError
from tilewire.service.gateway.connection.body_io import SlotReceiver
from tilewire.service.gateway.engines.client import Reply
from tilewire.service.gateway.engines.templates import BoundTemplate
from tilewire.service.gateway.request.access_log import report
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.context import Gateway, Incoming
from tilewire.service.gateway.request.habits import Habit
from tilewire.service.gateway.request.middleware import as_tilewire, exchange_for
from tilewire.service.gateway.request.response import error_response, server_timing
from tilewire.service.ipc.messages import Done, Stale
from tilewire.service.telemetry import log

if TYPE_CHECKING:
    from tilewire.service.gateway.connection.protocol import TilewireProtocol

OK = 200


class Lane:
    """The lane of one gateway, for all of its connections.

    Args:
        gateway: The parts.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._default_headers: list[tuple[bytes, bytes]] | None = None
        self._ok_head = b""

    def take(self, protocol: TilewireProtocol, habit: Habit, data: bytes) -> bool:
        """Answers a request, if it repeats the habit and nothing stands in its way.

        Args:
            protocol: Its connection.
            habit: What the connection remembers.
            data: All that has come: the whole request, its beginning down to its first tensor, or its head alone.

        Returns:
            Whether it was taken. If not, nothing has happened, and the ordinary path has to look at it.
        """
        form = habit.form
        begins = data.startswith(habit.lead, form.nbytes) or len(data) == form.nbytes
        if not begins or len(data) > habit.nbytes or (own := form.own(data)) is None:
            return False
        if not protocol.is_idle or not self.gateway.engines.knows(habit.resident_types):
            return False
        leases = self._enter(habit)
        if leases is None:
            return False
        self.gateway.metrics.observe_lane(habit.op)
        Passage(self, protocol, habit, leases, own).receive(data)
        return True

    def _enter(self, habit: Habit) -> Leases | None:
        """Passes the doors as the middleware and the route do; nothing is left behind when one is shut."""
        doorman = self.gateway.doorman
        leases = None
        try:
            # The same entry of the same file: what was allowed to it still is.
            if doorman.identify(habit.path, habit.headers) is not habit.access:
                return None
            leases = self.gateway.admission.admit()
            leases.lease(habit.slot_bytes)
            doorman.admit(habit.access, habit.charged_bytes)
        except TilewireError:
            if leases is not None:
                leases.release()
            return None
        return leases

    def head(self, status: int, default_headers: list[tuple[bytes, bytes]]) -> bytes:
        """Status line and the server's own headers, which change once a second."""
        if status != OK:
            return STATUS_LINE[status] + _lines(default_headers)
        if default_headers is not self._default_headers:
            self._default_headers = default_headers
            self._ok_head = STATUS_LINE[OK] + _lines(default_headers)
        return self._ok_head


class Passage:
    """One request on the lane; stands where the protocol has uvicorn's cycle.

    Args:
        lane: That it takes.
        protocol: Its connection.
        habit: That it repeats.
        leases: Its place among those under way, and one slot for its body and its result.
        own: Values of headers that are its own.

    Attributes:
        more_body: The last byte of its body is still to come; these are what the protocol asks of a cycle.
        response_started: Its answer has begun.
        response_complete: Its answer is written, or there will be none from here.
        keep_alive: Its answer is not the connection's last.
        disconnected: The client left.
        message_event: Set when something happens that a task would wait for; here none does.
        waiting_for_100_continue: Never.
    """

    __slots__ = (
        "_deadline_ns",
        "_engine",
        "_exchange",
        "_habit",
        "_job_id",
        "_lane",
        "_lease",
        "_leases",
        "_own",
        "_protocol",
        "_receiver",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
    )
    waiting_for_100_continue = False

    def __init__(
        self, lane: Lane, protocol: TilewireProtocol, habit: Habit, leases: Leases, own: Mapping[str, str]
    ) -> None:
        self._lane = lane
        self._protocol = protocol
        self._habit = habit
        self._leases = leases
        self._lease = leases.first
        self._own = own
        self._exchange = exchange = exchange_for({**habit.headers, **own} if own else habit.headers, _NOTHING_MORE)
        exchange.op, exchange.access = habit.op, habit.access
        exchange.charged_bytes = habit.charged_bytes
        exchange.receive_began_s = exchange.began_s
        self._deadline_ns = time.monotonic_ns() + habit.timeout_ns if habit.timeout_ns else 0
        self.more_body = self.keep_alive = True
        self.response_started = self.response_complete = self.disconnected = False

    @property
    def message_event(self) -> _Nobody:
        """See the class."""
        return _NOBODY

    def receive(self, data: bytes) -> None:
        """Takes what has come of the body, and waits for the rest."""
        habit, protocol = self._habit, self._protocol
        protocol.enter(self)
        gateway = self._lane.gateway
        begun, begin = len(data) - habit.form.nbytes, self._lease.offset + habit.body_at
        view = gateway.arena.segment.view
        view[begin : begin + begun] = memoryview(data)[habit.form.nbytes :]
        gateway.metrics.observe_load(gateway.admission.in_flight, gateway.arena)
        if begun == habit.body_bytes:
            self._compute()
            return
        rest = view[begin + begun : begin + habit.body_bytes]
        self._receiver = SlotReceiver(protocol, rest, begun, gateway.settings.body_timeout_s)
        protocol.transport.set_protocol(self._receiver)
        self._receiver.done.add_done_callback(self._on_body)

    def _on_body(self, done: asyncio.Future[None]) -> None:
        """The rest of the body is in, or will never be."""
        self._receiver.stop()
        self._exchange.received_bytes = self._receiver.received
        error = done.exception()
        if self._protocol.transport.is_closing() or isinstance(error, ClientGone):
            self._leave(None)
            return
        self._protocol.transport.set_protocol(self._protocol)
        self._protocol.flow.resume_reading()
        if isinstance(error, TilewireError):
            self.keep_alive = False
            self._protocol.is_refused = True
            self._refuse(error)
            return
        lead = self._habit.lead
        if self._body()[: len(lead)] == lead:
            self._compute()
        else:
            self._replay()

    def _compute(self) -> None:
        """Sends the job."""
        self.more_body = False
        habit, exchange, engines = self._habit, self._exchange, self._lane.gateway.engines
        exchange.received_bytes = habit.body_bytes
        exchange.receive_s = time.perf_counter() - exchange.receive_began_s
        token = log.request_id.set(exchange.request_id)
        try:
            self._engine, self._job_id, future = engines.submit(
                self._bound(), deadline_ns=self._deadline_ns, priority=habit.priority
            )
        except Exception as error:  # noqa: BLE001  (the last line of defence: it is logged and answered)
            # Mostly: the engine went while the body came.
            self._fail(error)
            return
        finally:
            log.request_id.reset(token)
        self._protocol.on_gone = self._cancel
        future.add_done_callback(self._on_reply)

    def _bound(self) -> BoundTemplate:
        habit, begin = self._habit, self._lease.offset
        return BoundTemplate(habit.template, tuple([begin + at for at in (*habit.placed, habit.out_at)]))

    def _cancel(self) -> None:
        """The client left. The slot is the engine's until it answers."""
        self.disconnected = True
        self._engine.cancel(self._job_id)

    def _on_reply(self, future: asyncio.Future[Reply]) -> None:
        """The engine has answered, whatever it says."""
        self._protocol.on_gone = None
        try:
            reply = future.result()
            if self.disconnected:
                self._leave(None)
            elif isinstance(reply, Done):
                self._answer(reply)
            else:
                assert isinstance(reply, Stale), "This is a bug."
                self._lane.gateway.engines.learn(reply)
                self._replay()
        except Exception as error:  # noqa: BLE001  (the last line of defence: it is logged and answered)
            self._fail(error)

    def _answer(self, done: Done) -> None:
        began_s = time.perf_counter()
        habit, exchange, lane = self._habit, self._exchange, self._lane
        exchange.timings, exchange.batch_size = done.timings, done.batch_size
        lines = (
            f"{server_timing(exchange.receive_s, done.timings)}\r\nx-batch-size: {done.batch_size}\r\n"
            f"{habit.more_headers}x-request-id: {exchange.request_id}\r\n{self._last_line()}\r\n"
        )
        out_at = self._lease.offset + habit.out_at
        result = lane.gateway.arena.segment.view[out_at : out_at + habit.out_bytes]
        head = lane.head(OK, self._protocol.server_state.default_headers)
        exchange.sent_bytes = len(habit.answer_lead) + habit.out_bytes
        # Copied, and so the slot goes back at once: when the client has been served.
        whole = b"".join((head, habit.answer_head, lines.encode("ascii"), habit.answer_lead, result))
        self._write(whole)
        exchange.send_s = time.perf_counter() - began_s
        lane.gateway.metrics.observe_stage(habit.op, "receive", exchange.receive_s)
        lane.gateway.metrics.observe_stage(habit.op, "send", exchange.send_s)
        self._leave(OK)

    def _fail(self, error: Exception) -> None:
        """Answers whatever was raised, unless its answer has begun: then the connection is of no use any more."""
        known = as_tilewire(error, self._exchange)
        if not self.response_started:
            self._refuse(known)
        elif not self.response_complete:
            self._protocol.transport.abort()
            self._leave(known.status)

    def _refuse(self, error: TilewireError) -> None:
        """Answers an error as the middleware does, unless nobody is there to read it."""
        gateway, exchange = self._lane.gateway, self._exchange
        if error.is_refusal:
            gateway.metrics.observe_rejection(error.code)
        if isinstance(error, ClientGone):
            self._leave(None)
            return
        response = error_response(error, exchange, self._habit.path)
        headers = [*response.raw_headers, (b"x-request-id", exchange.request_id.encode("ascii"))]
        head = self._lane.head(error.status, self._protocol.server_state.default_headers)
        body = bytes(response.body)
        exchange.sent_bytes = len(body)
        last = self._last_line()
        self._write(head + _lines(headers) + last.encode("ascii") + b"\r\n" + body)
        self._leave(error.status)

    def _last_line(self) -> str:
        if self._lane.gateway.admission.is_draining:
            self.keep_alive = False
        return "" if self.keep_alive else "connection: close\r\n"

    def _write(self, answer: bytes) -> None:
        protocol = self._protocol
        self.response_started = True
        if not protocol.transport.is_closing():
            protocol.transport.write(answer)
            if self.more_body:
                # Closing with bytes unread would reset the connection, and the client would lose the answer.
                protocol.linger()
            elif not self.keep_alive:
                protocol.transport.close()
        self.response_complete = True
        protocol.leave()

    def _leave(self, status: int | None) -> None:
        """The request is over; without a status the client left before its answer."""
        self._leases.release()
        self.response_complete = True
        if self._protocol.transport.is_closing():
            # It leads back here: together they would wait for the garbage collector.
            self._protocol.cycle = None  # type: ignore[assignment]
        report(self._lane.gateway, self._exchange, self._habit.scope, status)

    def _replay(self) -> None:
        """Gives the request to the ordinary path, as if it had only now come."""
        gateway, habit = self._lane.gateway, self._habit
        body = bytes(self._body())
        self._leases.release()
        gateway.doorman.take_back(habit.access, habit.charged_bytes)
        scope = dict(habit.scope)
        scope["headers"] = [
            (name, own.encode("ascii") if (own := self._own.get(name.decode("latin-1"))) is not None else value)
            for name, value in scope["headers"]
        ]
        self._protocol.replay(self, scope, body)

    def _body(self) -> memoryview:
        begin = self._lease.offset + self._habit.body_at
        return self._lane.gateway.arena.segment.view[begin : begin + self._habit.body_bytes]


class _Nobody:
    """An event that nobody waits for."""

    def set(self) -> None:
        """It happened."""


async def _nothing() -> Never:
    raise AssertionError("This is a bug: the lane reads bodies itself.")


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)


_NOBODY = _Nobody()
_NOTHING_MORE = Incoming(_nothing)
