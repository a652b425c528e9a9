"""Reports a request that has ended: to the metrics, the key's quota, the tracer and the log.

Owns the fields of the access log and the attributes of spans. Runs in the gateway's event loop, after the answer.
"""

from __future__ import annotations

import time

import structlog

from tilewire.service.errors import ClientGone
from tilewire.service.gateway.request.context import Gateway, RequestContext
from tilewire.service.gateway.telemetry.metrics import EndedRequest
from tilewire.service.gateway.telemetry.tracing import Span, shifted, stages_of
from tilewire.service.telemetry.counters import Failure

logger: structlog.stdlib.BoundLogger = structlog.get_logger("tilewire.access")

SERVER_ERROR = 500
# Longest path that is reported: a name of 255 characters, all of them escaped, has room. A request line may have 64 KiB.
MAX_PATH_LENGTH = 1024


def report(gateway: Gateway, context: RequestContext) -> None:
    """Counts a request that has ended, and hands it to the tracer and the log."""
    ended_s = time.perf_counter()
    refusal = context.stream.refusal
    if context.status is None and refusal is not None:
        context.status, context.failure = refusal.status, refusal.failure
        context.request_id, context.sent_bytes = refusal.request_id, refusal.sent_bytes
    code = context.status or ClientGone.status
    trace_id = context.trace.trace_id if context.trace is not None else None
    if gateway.recorder is not None and gateway.recorder.records(context.trace):
        spans, attributes = _spans(context, ended_s), _attributes(context, code)
        trace_id = gateway.recorder.record(spans, context.trace, attributes, is_error=code >= SERVER_ERROR)
    access, received_bytes, key_name = context.access, context.received_bytes, None
    if access is not None and access.key is not None:
        key_name = access.key.name
        # A refusal for want of quota costs nothing: a key that keeps sending would be locked out for good.
        if access.quotas is not None and context.charged_bytes is not None:
            access.quotas.charge(access.key, received_bytes + context.sent_bytes - context.charged_bytes)
    gateway.metrics.observe_request(
        EndedRequest(
            context.op,
            code,
            ended_s - context.began_s,
            context.receive_s,
            context.send_s,
            received_bytes,
            context.sent_bytes,
            context.timings,
            context.request_id,
            trace_id,
            context.model,
            key_name,
            _failure(context, code) if context.failure else None,
        )
    )
    if gateway.settings.access_log:
        logger.info("request", **_fields(context, code, ended_s - context.began_s, trace_id))


def _failure(context: RequestContext, code: int) -> Failure:
    name = None if context.access is None else context.access.name
    # A path that no route has may hold anything.
    route = context.route or ("" if context.op is None else _path(context))
    return Failure(time.time(), context.head.method, route, context.op, code, context.failure, context.request_id, name)


def _fields(context: RequestContext, code: int, seconds: float, trace_id: str | None) -> dict[str, str | int | float]:
    fields: dict[str, str | int | float | None] = {
        "method": context.head.method,
        "path": _path(context),
        "op": context.op,
        "status": code,
        "ms": round(seconds * 1e3, 3),
        "request_id": context.request_id,
        "trace_id": trace_id,
        "key": None if context.access is None else context.access.name,
        "received_bytes": context.received_bytes,
        "sent_bytes": context.sent_bytes,
        "batch_size": context.batch_size or None,
        "receive_ms": round(context.receive_s * 1e3, 3) or None,
    }
    if context.timings is not None:
        for stage, spent_ns in context.timings.stages:
            fields[f"{stage}_ms"] = round(spent_ns / 1e6, 3) if spent_ns else None
    fields["send_ms"] = round(context.send_s * 1e3, 3) or None
    return {name: value for name, value in fields.items() if value is not None}


def _spans(context: RequestContext, ended_s: float) -> tuple[Span, ...]:
    """The request and its stages, in Unix time."""
    ended_ns = _ns(ended_s)
    received = (0, 0)
    if context.receive_began_s:
        received = (_ns(context.receive_began_s), _ns(context.receive_began_s + context.receive_s))
    sent = (_ns(ended_s - context.send_s), ended_ns) if context.send_s else (0, 0)
    whole = Span(f"{context.head.method} {context.route}".strip() or "HTTP", _ns(context.began_s), ended_ns)
    # What was measured is on the monotonic clock.
    to_unix_ns = time.time_ns() - time.perf_counter_ns()
    return shifted((whole, *stages_of(received, context.timings, sent)), to_unix_ns)


def _attributes(context: RequestContext, code: int) -> dict[str, str | int]:
    attributes: dict[str, str | int | None] = {
        "http.request.method": context.head.method or "_OTHER",
        "url.path": _path(context),
        "http.route": context.route or None,
        "http.response.status_code": code,
        "http.request.body.size": context.received_bytes,
        "http.response.body.size": context.sent_bytes,
        "tilewire.request_id": context.request_id,
        "tilewire.op": context.op,
        "tilewire.batch_size": context.batch_size or None,
        "tilewire.key": None if context.access is None else context.access.name,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _path(context: RequestContext) -> str:
    path = context.head.path
    return path if len(path) <= MAX_PATH_LENGTH else f"{path[:MAX_PATH_LENGTH]}..."


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
