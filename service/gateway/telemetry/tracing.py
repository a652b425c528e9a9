"""Traces: the caller's `traceparent`, and the spans that a request was made of, as plain values.

Owns the begin and end of each stage; `gateway.telemetry.otlp` sends spans. Runs only while tracing is on.

The gateway and the engine read one clock: Linux's monotonic clock is the machine's. So the engine's `arrived_ns` stands
on the same axis as the gateway's times. Within the engine, stages are laid end to end as they ran: queue, h2d, kernel,
d2h. Time between them, such as waiting for the batch before, is no stage and shows as the gap before `send`.
"""

from __future__ import annotations

import random
import re

import msgspec

from tilewire.service.ipc.messages import Timings

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


class TraceParent(msgspec.Struct, frozen=True):
    """The caller's span.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        is_sampled: The caller records its span, and expects ours.
        state: Value of `tracestate`.
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""


class Span(msgspec.Struct, frozen=True):
    """A span of time, in nanoseconds of Unix time."""

    name: str
    began_ns: int
    ended_ns: int


def parse_traceparent(value: str | None, state: str = "") -> TraceParent | None:
    """Reads a `traceparent` header (W3C Trace Context, level 1).

    A malformed one counts as absent, as the standard demands.
    """
    found = _TRACEPARENT.fullmatch(value.strip()) if value else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)


def is_sampled(parent: TraceParent | None, ratio: float) -> bool:
    """Parent-based sampling: the caller's decision, or one by `ratio` where there is none."""
    return parent.is_sampled if parent is not None else random.random() < ratio  # noqa: S311  (no secret)


def stages_of(receive: tuple[int, int], timings: Timings | None, send: tuple[int, int]) -> tuple[Span, ...]:
    """The stages of a request.

    Args:
        receive: When its body was received, began and ended; (0, 0) when none was. On the monotonic clock.
        timings: The engine's; None when it was not computed.
        send: When its tensor was sent, likewise.
    """
    spans = [Span("receive", *receive)] if receive[1] else []
    if timings is not None:
        at = timings.arrived_ns
        for name, spent_ns in timings.stages:
            if spent_ns:
                spans.append(Span(name, at, at + spent_ns))
            at += spent_ns
    if send[1]:
        spans.append(Span("send", *send))
    return tuple(spans)


def shifted(spans: tuple[Span, ...], by_ns: int) -> tuple[Span, ...]:
    """The same spans on another clock."""
    return tuple(Span(one.name, one.began_ns + by_ns, one.ended_ns + by_ns) for one in spans)
