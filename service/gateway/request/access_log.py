"""What is told of a request when it is over: to the metrics, to the key's quota, to whoever traces, and to the log.

Owns the fields of the access log and the attributes of spans. Knows no route. Runs in the gateway's event loop, after
the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from starlette.types import Scope

from tilewire.service.errors import ClientGone
from tilewire.service.gateway.request.context import Exchange, Gateway
from tilewire.service.gateway.telemetry.tracing import Finished, Span, shifted, stages_of

logger: structlog.stdlib.BoundLogger = structlog.get_logger("tilewire.access")

BAD_REQUEST, SERVER_ERROR = 400, 500


def report(gateway: Gateway, exchange: Exchange, scope: Scope, status: int | None) -> None:
    """Tells of a request that has ended.

    Args:
        gateway: The parts.
        exchange: The request.
        scope: ASGI's.
        status: Of its answer; None when the client left before one.
    """
    ended_s = time.perf_counter()
    code = status or ClientGone.status
    trace_id = exchange.trace.trace_id if exchange.trace is not None else None
    if gateway.recorder is not None and gateway.recorder.wants(exchange.trace):
        trace_id = gateway.recorder.record(_finished(exchange, scope, code, ended_s))
    _count(gateway, exchange, code, ended_s - exchange.began_s, trace_id)
    if gateway.settings.access_log:
        logger.info("request", **_fields(exchange, scope, code, ended_s - exchange.began_s, trace_id))


def sent_by(gateway: Gateway, exchange: Exchange, op: str) -> Callable[[float], None]:
    """Notes, for `TensorResponse`, how long an answer took to leave."""

    def on_sent(seconds: float) -> None:
        exchange.send_s = seconds
        gateway.metrics.observe_stage(op, "send", seconds)

    return on_sent


def _count(gateway: Gateway, exchange: Exchange, code: int, seconds: float, trace_id: str | None) -> None:
    metrics = gateway.metrics
    if exchange.op is not None:
        metrics.observe_request(exchange.op, code, seconds, exchange.request_id, trace_id)
        metrics.observe_outcome(exchange.op, seconds, exchange.timings if code < BAD_REQUEST else None)
        metrics.observe_bytes(exchange.op, exchange.received_bytes, exchange.sent_bytes)
    if exchange.access is not None and exchange.access.key is not None:
        nbytes = exchange.received_bytes + exchange.sent_bytes
        # A refusal for want of quota costs nothing: a key that asks on would be locked out for good.
        if exchange.charged_bytes is not None:
            gateway.doorman.settle(exchange.access, nbytes - exchange.charged_bytes)
        metrics.observe_key(exchange.access.key.name, code, nbytes)
    # Uploads and downloads take slots too, so whatever ended moves the gauges.
    metrics.observe_load(gateway.admission.in_flight, gateway.arena)


def _fields(
    exchange: Exchange, scope: Scope, code: int, seconds: float, trace_id: str | None
) -> dict[str, str | int | float]:
    fields: dict[str, str | int | float | None] = {
        "method": scope["method"],
        "path": scope["path"],
        "op": exchange.op,
        "status": code,
        "ms": round(seconds * 1e3, 3),
        "request_id": exchange.request_id,
        "trace_id": trace_id,
        "key": None if exchange.access is None else exchange.access.name,
        "received_bytes": exchange.received_bytes,
        "sent_bytes": exchange.sent_bytes,
        "batch_size": exchange.batch_size or None,
        "receive_ms": round(exchange.receive_s * 1e3, 3) or None,
    }
    if exchange.timings is not None:
        timings = exchange.timings
        for stage, spent_ns in (
            ("queue", timings.queue_ns),
            ("h2d", timings.h2d_ns),
            ("kernel", timings.kernel_ns),
            ("d2h", timings.d2h_ns),
        ):
            fields[f"{stage}_ms"] = round(spent_ns / 1e6, 3) if spent_ns else None
    fields["send_ms"] = round(exchange.send_s * 1e3, 3) or None
    return {name: value for name, value in fields.items() if value is not None}


def _finished(exchange: Exchange, scope: Scope, code: int, ended_s: float) -> Finished:
    ended_ns = _ns(ended_s)
    received = (0, 0)
    if exchange.receive_began_s:
        received = (_ns(exchange.receive_began_s), _ns(exchange.receive_began_s + exchange.receive_s))
    sent = (_ns(ended_s - exchange.send_s), ended_ns) if exchange.send_s else (0, 0)
    # Spans are in Unix time; what was measured is on the monotonic clock.
    to_unix_ns = time.time_ns() - time.perf_counter_ns()
    name = f"{scope['method']} {_route_of(exchange, scope)}".strip()
    (whole,) = shifted((Span(name, _ns(exchange.began_s), ended_ns),), to_unix_ns)
    return Finished(
        span=whole,
        stages=shifted(stages_of(received, exchange.timings, sent), to_unix_ns),
        parent=exchange.trace,
        attributes=_attributes(exchange, scope, code),
        is_error=code >= SERVER_ERROR,
    )


def _attributes(exchange: Exchange, scope: Scope, code: int) -> dict[str, str | int]:
    attributes: dict[str, str | int | None] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "http.route": _route_of(exchange, scope) or None,
        "http.response.status_code": code,
        "http.request.body.size": exchange.received_bytes,
        "http.response.body.size": exchange.sent_bytes,
        "tilewire.request_id": exchange.request_id,
        "tilewire.op": exchange.op,
        "tilewire.batch_size": exchange.batch_size or None,
        "tilewire.key": None if exchange.access is None else exchange.access.name,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _route_of(exchange: Exchange, scope: Scope) -> str:
    """The path's pattern: names of tensors in names of spans would make as many kinds of spans."""
    pattern = getattr(scope.get("route"), "path_format", None)
    if pattern is None and exchange.op is not None:
        pattern = scope["path"]
    return str(pattern or "")


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
