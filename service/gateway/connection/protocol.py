"""uvicorn's HTTP/1.1 protocol, with what a tensor server needs from its connections.

Owns six changes: the application gets its side of the connection (`gateway.connection.body_io`); errors of the parser
are answered as
problem details; offers of other protocols are declined (`gateway.connection.parser`); connections are bounded in
number, heads in size
and time, bodies in their least rate, and a client that does not read its answer loses its connection; one that has sent a
whole request and sends no more is still answered; and a drain gives idle connections a moment for what is on its way.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tilewire.service.errors import InvalidRequest, TilewireError, Unavailable
from tilewire.service.gateway.connection.body_io import JoinedWrites, RequestConnection, too_slow
from tilewire.service.gateway.connection.parser import RequestParser
from tilewire.service.gateway.request.context import CONNECTION
from tilewire.service.gateway.request.habits import MAX_HABITS, Habit
from tilewire.service.gateway.request.heads import Form, form_of
from tilewire.service.gateway.request.lane import Lane, Passage
from tilewire.service.gateway.request.response import LINGER_S, whole_error

DRAIN_GRACE_S = 0.5
# Request line and headers together, and trailers together; httptools has no bound of its own.
MAX_HEAD_BYTES = 2**16
# Beside its name and its value, a line of either has a colon, a space and its end.
LINE_BYTES = 4

# Method, target, version.
REQUEST_LINE_WORDS = 3

# What an orchestrator asks is answered whatever the load: it would end a server that is merely busy.
HEALTH_PATHS = (b"/healthz", b"/readyz", b"/v2/health/live", b"/v2/health/ready")
PROBES = tuple(b"%s %s " % (verb, path) for verb in (b"GET", b"HEAD") for path in HEALTH_PATHS)

# When a client that sends no more is asked whether it is still there: soon, and then ever more seldom.
FIRST_PROBE_S, LAST_PROBE_S = 0.02, 2.0
# `tcpi_state` in the first byte of TCP_INFO, once the other side has refused what we sent.
TCP_CLOSE = 7


class TilewireProtocol(HttpToolsProtocol):
    """One connection.

    Attributes:
        patience_s: Longest time for a head to come, and longest time in which a client reads nothing of its answer.
        min_body_bytes_per_s: Least rate of a body that takes longer than `patience_s`.
        max_body_s: Longest time for a body at that rate: a longer body has a larger least rate.
        max_connections: Of this gateway; those above it are answered 503.
        lane: Answers requests that repeat earlier ones; None for none.
        is_refused: What still comes is not read.
    """

    patience_s = 30.0
    min_body_bytes_per_s = 0
    max_body_s = math.inf
    max_connections = 2**31
    lane: Lane | None = None
    parser: RequestParser  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        self.on_gone: Callable[[], None] | None = None
        # What an error is answered like, before any request line was read.
        self.url = b""
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._body_bytes = 0
        self._unsent_bytes = 0
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self.is_refused = False
        # Between two requests, nothing of the next one has come.
        self._is_between, self._num_requests = True, 0
        self._is_in_head = True
        # Of a head that is not in, or since the last byte of a body; and of the trailers behind it.
        self._field_bytes = self._trailer_bytes = 0
        self._is_half_closed = False
        self._idle_since_s = 0.0
        # The bytes that a request began with, the heads of the last ones, and what is remembered of those that came again.
        self._chunk = b""
        self._heads: list[Form] = []
        self._habits: list[Habit] = []
        self.parser = RequestParser(self)
        super().connection_made(transport)
        self._is_excess = len(self.connections) > self.max_connections
        # A client that never sends anything is idle from the start.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._habits and self._takes_lane(data):
            return
        if self._is_excess and not data.startswith(PROBES):
            self._is_excess = False
            # Others may have left while this one was idle, or asked for its health.
            if len(self.connections) > self.max_connections:
                self.url = _target_of(data)
                self._refuse(Unavailable(f"this gateway has {self.max_connections} connections, which is its limit"))
        if self.is_refused:
            return
        before = self._num_requests, self._is_in_head, self._body_bytes
        self._chunk = data if self._is_between else b""
        super().data_received(data)
        self._chunk = b""
        if self.is_refused or self._is_between:
            return
        if before == (self._num_requests, self._is_in_head, self._body_bytes):
            # Else most of these bytes may be a body, or a request before this one; what is whole is measured when it is in.
            self._field_bytes += len(data)
        if self._field_bytes > MAX_HEAD_BYTES:
            what = "request line and headers" if self._is_in_head else "trailers"
            self.send_400_response(f"the {what} exceed {MAX_HEAD_BYTES} bytes")
        elif self._is_in_head:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.patience_s, self._give_up_head)
        elif self._body_timer is None:
            self._body_timer = self.loop.call_later(self.patience_s, self._check_rate, time.monotonic())

    def _takes_lane(self, data: bytes) -> bool:
        lane = self.lane
        if lane is not None:
            for habit in self._habits:
                if lane.take(self, habit, data):
                    return True
        return False

    def remember(self, habit: Habit) -> None:
        """From now on, such requests take the lane."""
        others = [one for one in self._habits if one.form != habit.form]
        self._habits = [habit, *others][:MAX_HABITS]

    def on_message_begin(self) -> None:
        """The first byte of a request is in."""
        self._is_between = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is in, or a trailer: those are ignored (RFC 9110, section 6.5.1), and bounded as heads are."""
        if self._is_in_head:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value) + LINE_BYTES
        if self._trailer_bytes > MAX_HEAD_BYTES:
            problem = f"the trailers exceed {MAX_HEAD_BYTES} bytes"
            self.send_400_response(problem)
            # Ends the parsing of what else has come.
            raise ValueError(problem)

    def on_headers_complete(self) -> None:
        """The head of a request is in."""
        nbytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if nbytes > MAX_HEAD_BYTES:
            raise ValueError(f"the request line and headers exceed {MAX_HEAD_BYTES} bytes")
        self._is_in_head = False
        self._field_bytes = self._trailer_bytes = 0
        self._stop_head_timer()
        # uvicorn gives the transport to the cycle that it makes.
        transport, joined = self.transport, JoinedWrites(self.transport)
        self.transport = joined  # type: ignore[assignment]
        super().on_headers_complete()
        self.transport = transport
        joined.follow(self.cycle)
        # Behind pipelined requests, the parser is ahead of the one that is being answered: each needs its own cycle.
        connection = RequestConnection(self, self.cycle, self._repeated_head())
        self.scope["extensions"] = {CONNECTION: connection}  # type: ignore[dict-item]

    def _repeated_head(self) -> bytes:
        """The head of this request, when one of the last was of its form and it began with its chunk."""
        chunk, self._chunk = self._chunk, b""
        for form in self._heads:
            if form.own(chunk) is not None:
                return chunk[: form.nbytes]
        if (new := form_of(chunk)) is not None:
            self._heads = [new, *self._heads][:MAX_HABITS]
        return b""

    def on_body(self, body: bytes) -> None:
        """A piece of a body that goes through the parser."""
        self._body_bytes += len(body)
        self._field_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The last byte of a body is in, unless it has yet to come."""
        if self.parser.is_early:
            return
        self._is_in_head = self._is_between = True
        self._num_requests += 1
        self.stop_body_timer()
        super().on_message_complete()
        if self.cycle.keep_alive and not self.parser.should_keep_alive():
            # `Connection: close` stood in a trailer: the parser reads nothing behind it.
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether the next bytes begin a request, and nothing is under way."""
        return (
            self._is_between
            and not self.is_refused
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
            and not self.transport.is_closing()
        )

    def enter(self, passage: Passage) -> None:
        """A request takes the lane: it stands where uvicorn's would."""
        self.cycle = passage  # type: ignore[assignment]

    def leave(self) -> None:
        """A request on the lane is answered; those that came meanwhile may begin."""
        if self.pipeline or self.timeout_keep_alive_task is None:
            self.on_response_complete()
            return
        # Cancelling a timer and setting another one for each request costs more: this one looks when it ends.
        self.server_state.total_requests += 1
        self._idle_since_s = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing has come for long, unless it came on the lane."""
        self.timeout_keep_alive_task = None
        rest_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy or rest_s > 0:
            pause_s = self.timeout_keep_alive if is_busy else rest_s
            self.timeout_keep_alive_task = self.loop.call_later(pause_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def replay(self, passage: Passage, scope: Scope, body: bytes) -> None:
        """A request leaves the lane, whole and as if it had just come, for the ordinary path."""
        joined = JoinedWrites(self.transport)
        cycle = RequestResponseCycle(
            scope=scope,  # type: ignore[arg-type]
            transport=joined,  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=passage.keep_alive,
            on_response=self.on_response_complete,
        )
        joined.follow(cycle)
        cycle.body += body
        cycle.more_body = False
        cycle.message_event.set()
        scope["state"] = self.app_state.copy()
        scope["extensions"] = {CONNECTION: RequestConnection(self, cycle)}
        passage.response_complete = True
        # Behind it may stand pipelined ones already.
        newest: object = self.cycle
        if newest is passage:
            self.cycle = cycle
        self._start_asgi_task(cycle, self.app)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP request, unless their request has its answer, or the one before is still due."""
        if self.is_refused:
            return
        self.is_refused = True
        if self.cycle is not None and self.cycle.response_complete and not self._is_in_head:
            self.linger()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or not self.cycle.more_body:
                # Nothing may come between the bytes of an answer that is under way; it is the last one.
                self.cycle.keep_alive = False
                return
            # The body itself is broken: nobody waits for what it would have given.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refuse(InvalidRequest(f"request: {msg}"))

    def _refuse(self, error: TilewireError) -> None:
        """Answers an error that belongs to no request that the application knows, and closes."""
        self.is_refused = True
        self.transport.write(whole_error(error, self.url))
        self.linger()

    def linger(self) -> None:
        """Closes after what was written, but reads on for a moment."""
        # Closing with bytes unread would reset the connection, and the client would lose the answer. TLS has no half-close.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: a whole request is still answered, unless the client turns out to be gone.

        A client that has left and one that has only ended its side look the same. An interim response tells them apart: the
        system of a client that has left refuses it.
        """
        cycle = self.cycle
        if self.scheme == "https" or self.is_refused or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            cycle.keep_alive = False
            self._probe(FIRST_PROBE_S)
        return True

    def _probe(self, pause_s: float) -> None:
        """Asks whether the client is there, while nothing of its answer is written."""
        transport, cycle = self.transport, self.cycle
        if transport.is_closing() or cycle.response_complete:
            return
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
                transport.abort()
                return
            is_answering = cycle.response_started or bool(self.pipeline)
            if not is_answering and self.scope["http_version"] == "1.1":
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe_timer = self.loop.call_later(pause_s, self._probe, min(2 * pause_s, LAST_PROBE_S))

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left."""
        self._stop_head_timer()
        self.stop_body_timer()
        self._stop_write_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()
        for timer in (self._linger_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._forget()

    def _forget(self) -> None:
        """Drops requests that lead back to this connection: together they would wait for the garbage collector."""
        while self.pipeline:
            cycle, _app = self.pipeline.pop()
            cycle.scope["extensions"] = {}
            if cycle is self.cycle:
                self.cycle = None  # type: ignore[assignment]
        if self.cycle is not None and self.cycle.response_complete:
            self.cycle = None  # type: ignore[assignment]

    def take_back(self, *, is_complete: bool) -> None:
        """The connection is the parser's again, a fresh one: the old one still waits for the body."""
        if self.transport.is_closing():
            return
        self.parser = RequestParser(self)
        self.transport.set_protocol(self)
        self.stop_body_timer()
        # Read on: that is how a client that leaves while its request is computed is noticed.
        self.flow.resume_reading()
        self._is_in_head = self._is_between = True
        if is_complete:
            self.cycle.more_body = False
        else:
            # What still comes belongs to a body that nobody reads.
            self.is_refused = True
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
        if self.flow.read_paused:
            # It is we who do not read, until the requests before this one are answered.
            self._head_timer = self.loop.call_later(self.patience_s, self._give_up_head)
            return
        self.send_400_response(f"the request line and headers did not end within {self.patience_s:g} s")

    def _check_rate(self, began_s: float) -> None:
        """A body that goes through the parser must have come at the least rate, and all of it within the longest time."""
        self._body_timer = None
        elapsed_s = time.monotonic() - began_s
        if self.flow.read_paused:
            # It is we who do not read.
            self._body_bytes, began_s = 0, time.monotonic()
        elif elapsed_s > self.max_body_s or self._body_bytes < self.min_body_bytes_per_s * elapsed_s:
            if self.cycle.response_complete:
                self.transport.close()
            else:
                self.send_400_response(too_slow(self.min_body_bytes_per_s, self._body_bytes))
            return
        self._body_timer = self.loop.call_later(self.patience_s, self._check_rate, began_s)

    def stop_body_timer(self) -> None:
        """The body is in, or comes another way."""
        self._body_bytes = 0
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

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


def _target_of(head: bytes) -> bytes:
    """Where an unread request goes, or nothing when its line is not whole."""
    words = head[:MAX_HEAD_BYTES].partition(b"\r\n")[0].split(b" ")
    return words[1] if len(words) == REQUEST_LINE_WORDS else b""
