"""Writes answers: the only writer of response heads, for ordinary answers, errors and broken connections.

Owns the header lines, the form of errors and the moment at which slots go back.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tilewire.service.errors import ClientGone, InternalError, TilewireError, Unauthorized
from tilewire.service.gateway.request.adapter import Answer
from tilewire.service.gateway.request.context import Gateway, RequestContext
from tilewire.service.gateway.request.head import REQUEST_ID
from tilewire.service.ipc.messages import TensorInfo, Timings
from tilewire.service.placement import part_of

# An error that leaves more of a body unread than this costs the connection: discarding it would cost more.
MAX_DISCARDED_BYTES = 2**16

logger: structlog.stdlib.BoundLogger = structlog.get_logger("tilewire.gateway")


async def respond(gateway: Gateway, context: RequestContext, status: int, answer: Answer) -> None:
    """Writes an answer and measures how long it takes to leave."""
    began_s = time.perf_counter()
    nbytes = 0
    for chunk in answer.chunks:
        nbytes += len(chunk)
    lines = f"content-type: {answer.content_type}\r\ncontent-length: {nbytes}\r\n{answer.lines}"
    written = _write(gateway, context, status, lines, answer.chunks, nbytes)
    if written is not None:
        await written
    context.send_s = time.perf_counter() - began_s


async def respond_route(
    gateway: Gateway, context: RequestContext, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> None:
    """Writes the answer of a framework's route, which has made its headers."""
    lines = "".join(f"{name.decode('latin-1')}: {value.decode('latin-1')}\r\n" for name, value in headers)
    written = _write(gateway, context, status, lines, [body], len(body))
    if written is not None:
        await written


def _write(
    gateway: Gateway,
    context: RequestContext,
    status: int,
    lines: str,
    chunks: Sequence[bytes | memoryview],
    nbytes: int,
    *,
    closes: bool = False,
) -> Awaitable[None] | None:
    """Writes an answer of `nbytes`, with the header lines that every answer has.

    Returns:
        None when no chunk is needed any more; else what ends then.
    """
    context.status, context.sent_bytes = status, nbytes
    lines += f"{REQUEST_ID}: {context.request_id}\r\n"
    if gateway.origins is not None:
        lines += gateway.origins.lines_for(context.head.headers)
    written = context.stream.respond(status, lines, chunks, closes or gateway.admission.is_draining)
    return None if written is None else _note_end(context, written)


async def _note_end(context: RequestContext, written: Awaitable[None]) -> None:
    """Waits until an answer has left; for logs and metrics, one that the client did not wait for is no success."""
    await written
    if context.stream.is_cut:
        context.status = ClientGone.status
        # What nobody waited for is nobody's failure.
        context.failure = ""


async def respond_preflight(gateway: Gateway, context: RequestContext) -> bool:
    """Answers a browser's question whether a page may call: before keys are checked, for it carries none.

    Returns:
        Whether it was that question.
    """
    origins = gateway.origins
    headers = None if origins is None else origins.preflight(context.head.method, context.head.headers)
    if headers is None:
        return False
    context.status = HTTPStatus.NO_CONTENT
    lines = "".join(f"{name}: {value}\r\n" for name, value in (*headers, (REQUEST_ID, context.request_id)))
    written = context.stream.respond(HTTPStatus.NO_CONTENT, lines, (), closes=False)
    if written is not None:
        await written
    return True


def respond_error(gateway: Gateway, context: RequestContext, error: Exception) -> Awaitable[None] | None:
    """Answers an error, unless an answer has begun or nobody is there to read it.

    Returns:
        None when the answer has left or is with the transport; else what ends then.

    Raises:
        TilewireError: An answer has begun: the connection is of no use any more.
    """
    known = error if isinstance(error, TilewireError) else unexpected(error, context)
    if context.status is not None:
        raise known
    # Tracebacks lead back to the context, and both would wait for the garbage collector.
    known.__traceback__ = known.__context__ = known.__cause__ = None
    context.error = known
    if isinstance(known, ClientGone):
        return None
    context.failure = known.code
    body, content_type = _error_body(known, context.request_id, context.head.path)
    lines = f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n{_error_lines(known, context)}"
    return _write(gateway, context, known.status, lines, [body], len(body), closes=not is_rest_small(context))


def unexpected(error: Exception, context: RequestContext) -> TilewireError:
    """Logs an error that is none of the tree, whose text stays here; returns the one that answers it."""
    logger.error("a request failed", request_id=context.request_id, exc_info=error)
    return InternalError("internal error; the request id leads to the log")


def is_rest_small(context: RequestContext) -> bool:
    """Whether what is unread of a body is worth discarding rather than the connection."""
    if context.stream.is_complete:
        return True
    head = context.head
    is_small = (head.content_length or 0) <= MAX_DISCARDED_BYTES and not head.is_chunked
    return is_small and not context.received_bytes


def connection_error(context: RequestContext, error: TilewireError) -> bytes:
    """A whole answer to bytes that became no request, in the form of the path and with its id as far as they were read."""
    body, content_type = _error_body(error, context.request_id, context.head.path)
    context.status, context.failure, context.sent_bytes = error.status, error.code, len(body)
    retry = f"retry-after: {error.retry_after_s}\r\n" if error.retryable else ""
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\n{REQUEST_ID}: {context.request_id}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


class Answered(Response):
    """Result of a framework's route whose answer was written past the framework."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes nothing."""


def timing_lines(receive_s: float, timings: Timings, batch_size: int) -> str:
    """Header lines of a computed answer: `Server-Timing` with the stages that took any time, and `X-Batch-Size`."""
    parts = [f"receive;dur={receive_s * 1e3:.3f}"] if receive_s else []
    if timings.queue_ns:
        parts.append(f"queue;dur={timings.queue_ns / 1e6:.3f}")
    if timings.h2d_ns:
        parts.append(f"h2d;dur={timings.h2d_ns / 1e6:.3f}")
    if timings.kernel_ns:
        parts.append(f"kernel;dur={timings.kernel_ns / 1e6:.3f}")
    if timings.d2h_ns:
        parts.append(f"d2h;dur={timings.d2h_ns / 1e6:.3f}")
    return f"server-timing: {', '.join(parts)}\r\nx-batch-size: {batch_size}\r\n"


def json_answer(content: object, lines: str = "") -> Answer:
    """An answer in JSON, from msgspec structs, lists, dicts and numbers."""
    return Answer("application/json", [msgspec.json.encode(content)], lines)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """As `json_answer`, for a framework's route."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def describe_tensor(info: TensorInfo) -> dict[str, object]:
    """Returns the description of a resident tensor for clients."""
    return {
        "name": info.name,
        "shape": info.type.shape,
        "dtype": info.type.dtype,
        "bytes": info.type.nbytes,
        "created": timestamp(info.created),
        "last_used": timestamp(info.last_used),
        "hits": info.hits,
        "version": info.tag,
        "placement": info.placement,
        "engines": info.engines,
        "axis": info.axis or None,
        "parts": [_describe_part(info, engine) for engine in info.engines] if info.axis else [],
    }


def _describe_part(info: TensorInfo, engine: int) -> dict[str, int]:
    part = part_of(info.type, info.axis, engine, info.num_parts)
    return {"engine": engine, "begin": part.begin, "end": part.end, "bytes": part.type_of(info.type).nbytes}


def timestamp(unix_s: float | None) -> str | None:
    """Writes a Unix time as ISO 8601, in UTC and to the millisecond; None stays."""
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


def is_oip(path: str) -> bool:
    """Whether a path is under `/v2`, however it is spelled: its clients read an error only as `{"error": …}`."""
    # Other spellings have an empty or a dotted segment, or no slash before the first.
    is_plain = path.startswith("/") and "//" not in path and "/." not in path
    plain = path if is_plain else posixpath.normpath("/" + path.lstrip("/"))
    return plain == "/v2" or plain.startswith("/v2/")


def _error_lines(error: TilewireError, context: RequestContext) -> str:
    lines = f"retry-after: {error.retry_after_s}\r\n" if error.retryable else ""
    if context.allow:
        lines += f"allow: {context.allow}\r\n"
    if isinstance(error, Unauthorized):
        lines += 'www-authenticate: Bearer realm="tilewire"\r\n'
    return lines


def _error_body(error: TilewireError, request_id: str, path: str) -> tuple[bytes, str]:
    """An error's body and its content type: `{"error": …}` under `/v2`, RFC 9457 problem details elsewhere."""
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
