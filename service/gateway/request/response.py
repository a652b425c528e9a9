"""What goes out: tensors straight from their slots, JSON, and errors in the form that the path asks for.

Owns the bytes of every answer and the moment at which slots go back. Knows no op and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tilewire.service.errors import TilewireError, Unauthorized
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.context import Exchange, connection_of, exchange_of
from tilewire.service.ipc.messages import Done, TensorInfo, Timings

# An answer of up to this is copied out of its slot: cheaper than waiting until it has left.
SMALL_BYTES = 2**16

# An error that leaves more of a body unread than this costs the connection: discarding it would cost more.
MAX_DISCARDED_BYTES = 2**16
LINGER_S = 2.0


class TensorResponse(Response):
    """A tensor from its slot; the slots go back when the last byte has left or was copied out, or the client is gone.

    Args:
        chunks: The body, in order; views of slots among them.
        content_type: Of the body.
        headers: Further headers.
        leases: Released at the end, whatever the end is.
        on_sent: Told how many seconds sending took.
    """

    def __init__(
        self,
        chunks: Sequence[bytes | memoryview],
        content_type: str,
        headers: Mapping[str, str],
        leases: Leases,
        on_sent: Callable[[float], None] | None = None,
    ) -> None:
        self.chunks = chunks
        self.leases = leases
        self.on_sent = on_sent
        self.body = b""
        self.background = None
        self.status_code = 200
        self.nbytes = sum(len(chunk) for chunk in chunks)
        self.raw_headers = [
            (b"content-type", content_type.encode("ascii")),
            (b"content-length", str(self.nbytes).encode("ascii")),
            *((name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends; see the class."""
        began_s = time.perf_counter()
        connection = connection_of(scope)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if connection is None or self.nbytes <= SMALL_BYTES:
                body = b"".join(self.chunks)
                self._release()
                await send({"type": "http.response.body", "body": body, "more_body": False})
            else:
                for chunk in self.chunks:
                    for piece in connection.pieces(chunk):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await connection.flushed()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._release()
        if self.on_sent is not None:
            self.on_sent(time.perf_counter() - began_s)

    def _release(self) -> None:
        # The views go before the slots that they show.
        self.chunks = ()
        self.leases.release()


def timing_headers(exchange: Exchange, done: Done) -> dict[str, str]:
    """Headers of a computed answer: where its time went, and how many requests shared the launch."""
    return {
        "server-timing": server_timing(exchange.receive_s, done.timings),
        "x-batch-size": str(done.batch_size),
    }


def server_timing(receive_s: float, timings: Timings) -> str:
    """Writes `Server-Timing`: the stages that took any time, in milliseconds."""
    parts = [f"receive;dur={receive_s * 1e3:.3f}"] if receive_s else []
    if timings.queue_ns:
        parts.append(f"queue;dur={timings.queue_ns / 1e6:.3f}")
    if timings.h2d_ns:
        parts.append(f"h2d;dur={timings.h2d_ns / 1e6:.3f}")
    if timings.kernel_ns:
        parts.append(f"kernel;dur={timings.kernel_ns / 1e6:.3f}")
    if timings.d2h_ns:
        parts.append(f"d2h;dur={timings.d2h_ns / 1e6:.3f}")
    return ", ".join(parts)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON, from msgspec structs, lists, dicts and numbers."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def describe_tensor(info: TensorInfo) -> dict[str, object]:
    """What clients see of a resident tensor."""
    return {
        "name": info.name,
        "shape": info.type.shape,
        "dtype": info.type.dtype,
        "bytes": info.type.nbytes,
        "created": _timestamp(info.created),
        "last_used": _timestamp(info.last_used),
        "hits": info.hits,
    }


def _timestamp(unix_s: float | None) -> str | None:
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


def is_oip(path: str) -> bool:
    """Whether a path is under `/v2`, however it is spelled: its clients read an error only as `{"error": …}`."""
    plain = posixpath.normpath("/" + path.lstrip("/"))
    return plain == "/v2" or plain.startswith("/v2/")


def error_response(error: TilewireError, exchange: Exchange, path: str) -> Response:
    """Writes an error: `{"error": …}` under `/v2`, RFC 9457 problem details elsewhere."""
    headers = {"retry-after": str(error.retry_after_s)} if error.retryable else {}
    if exchange.allow:
        headers["allow"] = exchange.allow
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="tilewire"'
    body, content_type = _told(error, exchange.request_id, path)
    return Response(body, error.status, headers, media_type=content_type)


def whole_error(error: TilewireError, url: bytes) -> bytes:
    """A whole answer by hand, to what the application never saw, in the form that the path asks for as far as it was read."""
    request_id = os.urandom(16).hex()
    body, content_type = _told(error, request_id, unquote_to_bytes(url.partition(b"?")[0]).decode("latin-1"))
    retry = f"retry-after: {error.retry_after_s}\r\n" if error.retryable else ""
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def _told(error: TilewireError, request_id: str, path: str) -> tuple[bytes, str]:
    """An error's body, and its content type."""
    if is_oip(path):
        return msgspec.json.encode({"error": error.detail}), "application/json"
    problem: dict[str, object] = {
        "type": f"urn:tilewire:error:{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "request_id": request_id,
    }
    return msgspec.json.encode(problem), "application/problem+json"


async def send_unread(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends an answer although the body is not read to its end.

    A small rest is left to the server, which discards it. For a large one the connection is closed, but not at once: closing
    with bytes unread resets the connection, and the client would lose the answer. So the answer leaves first, and what still
    comes is discarded for a moment.
    """
    exchange = exchange_of(scope)
    is_small = (exchange.content_length or 0) <= MAX_DISCARDED_BYTES and not exchange.is_chunked
    if exchange.incoming.is_complete or (is_small and not exchange.received_bytes):
        await response(scope, receive, send)
        return
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
    is_waiting_for_continue = "expect" in exchange.headers and not exchange.incoming.was_read
    if not is_waiting_for_continue and not exchange.incoming.is_disconnected:
        await _discard(exchange)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(exchange: Exchange) -> None:
    end_s = time.perf_counter() + LINGER_S
    with contextlib.suppress(TimeoutError):
        while not (exchange.incoming.is_complete or exchange.incoming.is_disconnected):
            async with asyncio.timeout(max(0.0, end_s - time.perf_counter())):
                message = await exchange.incoming()
                exchange.received_bytes += len(message.get("body", b""))
