"""uvicorn's HTTP/1.1 protocol, with what a tensor server needs from its connections.

Owns the way from bytes to requests. Requests of ops start `request.handle`; all others go to the application over ASGI.
Errors of the parser are answered as problem details, and a client that has sent a whole request and sends no more is still
answered.
"""

from __future__ import annotations

import asyncio
import math
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable
from http import HTTPMethod
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tilewire.service.errors import InvalidRequest, TilewireError, Unavailable
from tilewire.service.gateway.auth.flows import flow_of_address
from tilewire.service.gateway.connection.limits import (
    DRAIN_GRACE_S,
    EXCESS_IDLE_S,
    LINE_BYTES,
    MAX_HEAD_BYTES,
    PROBES,
    Limits,
)
from tilewire.service.gateway.connection.parser import RequestParser, check_head
from tilewire.service.gateway.connection.receive import SCRATCH_BYTES, Receiver
from tilewire.service.gateway.connection.stream import RequestStream
from tilewire.service.gateway.request.access_log import report
from tilewire.service.gateway.request.adapter import FindTarget
from tilewire.service.gateway.request.context import STREAM, Gateway, RequestContext
from tilewire.service.gateway.request.handle import handle
from tilewire.service.gateway.request.head import MAX_CACHED_BYTES, Head, HeadKey, key_of, own_values_in, read_head
from tilewire.service.gateway.request.response import connection_error

# Method, target, version.
REQUEST_LINE_WORDS = 3
METHODS = frozenset(HTTPMethod)


class TilewireProtocol(HttpToolsProtocol):
    """One connection; see `receive.Connection` for what its parts use.

    Attributes:
        gateway: Parts of the gateway whose ops are answered here; None for none.
        find_target: Finds the API and the op of a POST that `request.handle` answers.
        max_connections: Connections of this gateway above which new ones are answered 503.
        scratch: Memory for what is read and not received into a slot; None for memory of this connection's own.
        is_refused: Whether further bytes are left unread.
        on_lost: Called when the connection is gone.
    """

    gateway: Gateway | None = None
    find_target: FindTarget = staticmethod(lambda _path: None)
    timeout_s = 30.0
    min_body_bytes_per_s = 0
    max_body_s = math.inf
    max_connections = 2**31
    scratch: memoryview | None = None
    on_lost: Callable[[], None] = staticmethod(lambda: None)
    parser: RequestParser  # type: ignore[assignment]
    cycle: RequestStream | None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Asyncio's call: a client connected."""
        super().connection_made(transport)
        is_encrypted, sock = self.scheme == "https", transport.get_extra_info("socket")
        self.fd = -1 if is_encrypted or sock is None else sock.fileno()
        self.receiver = Receiver(self, self.scratch or memoryview(bytearray(SCRATCH_BYTES)))
        transport.set_protocol(self.receiver)
        self.client_flow = flow_of_address(self.client[0] if self.client else "")
        self.on_gone: Callable[[], object] | None = None
        self.was_cut = False
        # Form of an error, before any request line was read.
        self.url = b""
        self.is_refused = False
        # Between two requests, nothing of the next one has come.
        self._is_between, self._num_requests = True, 0
        self._is_in_head = True
        # Bytes of a head that is not in, or since the last byte of a body; and of the trailers behind it.
        self._field_bytes = self._trailer_bytes = 0
        self._is_half_closed = False
        # Header lines of every answer, and what they were made of.
        self._default_headers: list[tuple[bytes, bytes]] | None = None
        self._default_lines = b""
        # Key of the head that begins the bytes that are parsed, and what starts its request behind them.
        self._key: HeadKey | None = None
        self._start: Callable[[], None] | None = None
        # Starts each request behind the one under way, the newest first.
        self._waiting: deque[Callable[[], None]] = deque()
        # The parser appends pieces of bodies here by itself: a chunk of one byte costs no call of ours.
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # type: ignore[method-assign, assignment]
        self._is_excess = len(self.connections) > self.max_connections
        if self._is_excess:
            self.timeout_keep_alive = min(self.timeout_keep_alive, EXCESS_IDLE_S)
        self._limits = Limits(self)
        self.parser = RequestParser(self)

    def default_lines(self) -> bytes:
        """Header lines of every answer; uvicorn makes new ones each second."""
        headers = self.server_state.default_headers
        if headers is not self._default_headers:
            self._default_headers = headers
            self._default_lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return self._default_lines

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def takes_interim(self) -> bool:
        """Whether an interim response may be written now."""
        cycle = self.cycle
        return cycle is not None and cycle.is_http11 and not cycle.response_started and not self._waiting

    def feed(self, data: memoryview, nbytes: int) -> None:
        """Takes bytes that belong to no body of known length: heads, and what the parser has to look at.

        Their memory is used again when this returns.
        """
        key = None
        if self._is_between and self.gateway is not None:
            key = key_of(bytes(data[: min(nbytes, MAX_CACHED_BYTES)]))
            if key is not None and self._start_cached(self.gateway, key, data, nbytes):
                return
        chunk = bytes(data[:nbytes])
        if self._is_excess and not chunk.startswith(PROBES):
            self._is_excess, self.timeout_keep_alive = False, self.config.timeout_keep_alive
            # Others may have left while this one was idle, or were probes of its health.
            if len(self.connections) > self.max_connections:
                self.url = _target_of(chunk)
                too_many = Unavailable(f"this gateway has {self.max_connections} connections, which is its limit")
                self._refuse(too_many, _method_of(chunk), _headers_of(chunk))
        if self.is_refused:
            return
        self._key = key
        self._parse(chunk)
        self._key = None
        start, self._start = self._start, None
        if start is not None:
            start()

    def _parse(self, chunk: bytes) -> None:
        before = self._num_requests, self._is_in_head, self._limits.body_bytes
        was_between = self._is_between
        try:
            self.parser.feed_data(chunk)
        except httptools.HttpParserError as error:
            if was_between and self._num_requests == before[0]:
                # The request begins with these bytes. The parser does not report a header until it has seen the next one.
                self.headers = _headers_of(chunk)
            self.send_400_response(_reason_of(error))
        self._take_pieces()
        if self.is_refused or self._is_between:
            return
        if before == (self._num_requests, self._is_in_head, self._limits.body_bytes):
            # Else most of these bytes may be a body, or a request before this one; what is whole is measured when it is in.
            self._field_bytes += len(chunk)
        if self._field_bytes > MAX_HEAD_BYTES:
            what = "request line and headers" if self._is_in_head else "trailers"
            self.send_400_response(f"the {what} exceed {MAX_HEAD_BYTES} bytes")
        elif self._is_in_head:
            self._limits.begin_head()
        else:
            self._limits.begin_body()

    def _start_cached(self, gateway: Gateway, key: HeadKey, data: memoryview, nbytes: int) -> bool:
        """Starts a request whose head is cached, past the parser, if it stands alone."""
        cycle = self.cycle
        if self._is_excess or self.is_refused or (cycle is not None and not cycle.response_complete):
            return False
        cached = gateway.templates.find(key.text)
        if cached is None or self.flow.write_paused:
            return False
        length = cached.head.content_length or 0
        if nbytes - key.nbytes > length:
            return False
        self.cycle = stream = RequestStream(self, length, data[key.nbytes : nbytes])
        context = RequestContext(cached.head, key.own, stream)
        context.cached = cached
        stream.start(handle(gateway, context, cached.api, cached.op))
        return True

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's call: a header is in, or a trailer.

        Trailers are ignored (RFC 9110, section 6.5.1), and bounded as heads are.
        """
        if self._is_in_head:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value) + LINE_BYTES
        if self._trailer_bytes > MAX_HEAD_BYTES:
            problem = f"the trailers exceed {MAX_HEAD_BYTES} bytes"
            self.send_400_response(problem)
            # Ends the parsing of what else has come.
            raise ValueError(problem)

    def on_message_begin(self) -> None:
        """The parser's call: the first byte of a request is in."""
        self._is_between = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser's call: the head of a request is in."""
        nbytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if nbytes > MAX_HEAD_BYTES:
            raise ValueError(f"the request line and headers exceed {MAX_HEAD_BYTES} bytes")
        method, version = self.parser.inner.get_method().decode("ascii"), self.parser.inner.get_http_version()
        check_head(method, version, self.url, self.headers)
        self._is_in_head = False
        self._field_bytes = self._trailer_bytes = 0
        self._limits.end_head()
        stream = RequestStream(self)
        stream.is_head_only, stream.is_http11 = method == "HEAD", version == "1.1"
        # Bytes behind a CONNECT are for the host to which the client would be connected.
        stream.keep_alive = version != "1.0" and self.parser.inner.should_keep_alive() and method != "CONNECT"
        # An older client would take the interim response for the answer (RFC 9110, section 10.1.1).
        stream.waiting_for_100_continue = self.expect_100_continue and version != "1.0"
        start = self._prepare(stream, method, version)
        is_busy, self.cycle = self.is_busy, stream
        if is_busy:
            # A pipelined request.
            self.flow.pause_reading()
            self._waiting.appendleft(start)
        else:
            self._start = start

    def _prepare(self, stream: RequestStream, method: str, version: str) -> Callable[[], None]:
        """Returns the call that starts a request: `handle` for those of ops, else the application."""
        try:
            url = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            raise ValueError("the target is neither a path nor a URL") from None
        path = (url.path or b"").decode("ascii")
        if "%" in path:
            path = urllib.parse.unquote(path)
        target = self.find_target(path) if method == "POST" else None
        if self.gateway is not None and target is not None:
            head, own = read_head(method, path, url.query or b"", self.headers)
            context = RequestContext(head, own, stream)
            if stream.is_http11:
                context.key = self._key
            self._key, gateway = None, self.gateway
            return lambda: stream.start(handle(gateway, context, *target))
        self._key = None
        scope = self.scope
        scope["method"], scope["http_version"] = method, version
        scope["path"] = self.root_path + path
        scope["raw_path"] = self.root_path.encode("ascii") + (url.path or b"")
        scope["query_string"] = url.query or b""
        scope["extensions"] = {STREAM: stream}  # type: ignore[dict-item]
        return lambda: stream.start_task(self.app(scope, _no_message, _no_message))

    def _take_pieces(self) -> None:
        """Hands over what the parser found of a body."""
        pieces, cycle = self._pieces, self.cycle
        if not pieces or cycle is None:
            return
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._limits.body_bytes += len(body)
        self._field_bytes = 0
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.notify()

    def on_message_complete(self) -> None:
        """The parser's call: the last byte of a body is in, unless it has yet to come."""
        if self.parser.is_early:
            return
        self._take_pieces()
        self._is_in_head = self._is_between = True
        self._num_requests += 1
        self._limits.end_body()
        cycle = self.cycle
        assert cycle is not None, "This is a bug."
        cycle.more_body = False
        cycle.notify()
        if cycle.keep_alive and not self.parser.inner.should_keep_alive():
            # `Connection: close` stood in a trailer: the parser reads nothing behind it.
            cycle.keep_alive = False
            if cycle.response_complete:
                self.transport.close()

    def on_response_complete(self) -> None:
        """An answer is written: the next request may begin."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._limits.idle_since_s = self.loop.time()
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self._waiting:
            # Not at once: the one before is about to end, and has its slots until then.
            self.loop.call_soon(self._waiting.pop())

    def release(self, stream: object) -> None:
        """A request is over: on a connection that is gone, both would wait for each other and for the garbage collector."""
        if self.transport.is_closing() and self.cycle is stream:
            self.cycle = None

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP request, unless their request has its answer, or the one before is still due."""
        if self.is_refused:
            return
        self.is_refused = True
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and not self._is_in_head:
            self.linger()
            return
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body:
                # Nothing may come between the bytes of an answer that is under way; it is the last one.
                cycle.keep_alive = False
                return
            if self._waiting:
                # Its own answer comes behind those to the requests before it.
                cycle.break_body(f"request: {msg}")
                return
        # Between two requests, they are those of the last one. Before its target is in, the parser's method is a guess.
        headers = [] if self._is_between else self.headers
        method = "" if self._is_between or not self.url else self.parser.inner.get_method().decode("ascii")
        self._refuse(InvalidRequest(f"request: {msg}"), method, headers)

    def _refuse(self, error: TilewireError, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Answers an error that belongs to no request of the application, and closes.

        Args:
            error: Error.
            method: Method as far as it was read; empty before that.
            headers: Headers that were read.
        """
        self.is_refused = True
        path = urllib.parse.unquote(self.url.partition(b"?")[0].decode("latin-1"))
        head = Head(method, path, b"", {}, frozenset(), None, is_chunked=False)
        context = RequestContext(head, own_values_in(headers), RequestStream(self))
        target = self.find_target(path) if method == "POST" else None
        if target is not None:
            context.op = target[1].name
        self.transport.write(connection_error(context, error))
        if self.cycle is not None and self.is_busy:
            # Its body is broken: nobody waits for what it would have given, and it reports this answer when it ends.
            self.cycle.refusal, self.cycle.disconnected = context, True
            self.cycle.notify()
        elif self.gateway is not None:
            report(self.gateway, context)
        self.linger()

    def linger(self) -> None:
        """Closes after what was written, but reads on for a moment, and drops what it reads."""
        self.is_refused = True
        if self._is_half_closed:
            # Nothing is unread.
            self.transport.close()
            return
        self.flow.resume_reading()
        # Closing with bytes unread would reset the connection, and the client would lose the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._limits.linger()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Asyncio's call: the client sends no more. Its request is still answered, unless the client turns out to be gone.

        A client that has left and one that has only ended its side look the same.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            if cycle.more_body:
                cycle.break_body()
            else:
                cycle.keep_alive = False
                self._limits.probe()
        return True

    def check_gone(self) -> None:
        """Notes that the client has left, if its system has refused what was written."""
        if self.transport.is_closing() or self._limits.is_gone():
            self.was_cut = True
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's call: the connection is gone."""
        self._limits.stop()
        # Waiting requests will not be answered.
        if self._waiting:
            self._waiting.clear()
            self.cycle = None
        # Read before it is reset: something of an answer had not left.
        self.was_cut = self.was_cut or self.flow.write_paused
        super().connection_lost(exc)
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()
        if self.cycle is not None and self.cycle.response_complete:
            self.cycle = None
        self.on_lost()

    def begin_body(self) -> None:
        """The rest of a body comes past the parser, under a timer of its own."""
        self._limits.end_body()

    def end_body(self, *, is_complete: bool) -> None:
        """A body that came past the parser is in, or will not be."""
        if not self._is_between:
            # A fresh one: the old one still waits for the body.
            self.parser = RequestParser(self)
            self._is_in_head = self._is_between = True
        stream = self.cycle
        assert stream is not None, "This is a bug."
        if is_complete:
            stream.more_body = False
        else:
            # Bytes that still come belong to a body that nobody reads.
            self.is_refused = True
            stream.keep_alive = False

    def pause_writing(self) -> None:
        """Asyncio's call: the client reads more slowly than we write."""
        super().pause_writing()
        self._limits.begin_write()

    def resume_writing(self) -> None:
        """Asyncio's call: the client reads again."""
        self._limits.end_write()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server drains: this request's answer is the last one; an idle connection is closed after a moment."""
        if self.is_busy:
            assert self.cycle is not None, "This is a bug."
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(DRAIN_GRACE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.transport is not None and not self.transport.is_closing() and not self.is_busy:
            self.transport.close()


async def _no_message(*_message: object) -> Any:
    """Stands for ASGI's `receive` and `send`."""
    raise AssertionError("This is a bug: bodies and answers go by the stream.")


def _method_of(head: bytes) -> str:
    """Method of an unread request, or nothing when its line is not whole or begins with none."""
    method = _line_of(head)[0].decode("latin-1")
    return method if method in METHODS else ""


def _target_of(head: bytes) -> bytes:
    """Target of an unread request, or nothing when its line is not whole."""
    return _line_of(head)[1]


def _line_of(head: bytes) -> list[bytes]:
    """Words of the request line of an unread request, or as many empty ones."""
    words = head[:MAX_HEAD_BYTES].partition(b"\r\n")[0].split(b" ")
    return words if len(words) == REQUEST_LINE_WORDS else [b""] * REQUEST_LINE_WORDS


def _headers_of(head: bytes) -> list[tuple[bytes, bytes]]:
    """Returns the names, in lower case, and values of those lines of an unread head that are whole."""
    text, end, _ = head[:MAX_HEAD_BYTES].lstrip(b"\r\n").partition(b"\r\n\r\n")
    parts = [line.partition(b":") for line in (text + end).split(b"\r\n")[1:-1]]
    return [(name.lower(), value) for name, _, value in parts]


def _reason_of(error: httptools.HttpParserError) -> str:
    """Returns the mistake that the listener names, which the parser hides, or the parser's own words.

    A function of its own: a frame under the listener's that kept the cause would be a cycle.
    """
    cause = error.__context__
    return str(cause) if isinstance(cause, ValueError) else f"not understood as HTTP: {error}"
