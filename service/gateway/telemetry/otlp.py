"""Sends spans to an OpenTelemetry collector over OTLP/HTTP. Imported only when an endpoint is set: the packages are an extra.

Owns the exporter. It works in a thread of its own behind a bounded queue: a collector that is slow or gone costs
spans, never requests.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import requests
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from tilewire.service.config.process import TracingSettings
from tilewire.service.gateway.telemetry.tracing import Span, TraceParent, is_sampled

# How long one POST to the collector may take, and all that is left at the end.
EXPORT_TIMEOUT_S = 5.0
LAST_EXPORT_S = 2.0
# Longest body of a collector's answer that is read; a usual one has some bytes.
SHORT_BYTES = 2**12
# Variables that name a session with credentials.
CREDENTIAL_PROVIDERS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
)
# Time between two lines of the log that the packages write.
LINES_EVERY_S = 60.0


class Collector(requests.Session):
    """The collector, which answers 503 where it cannot be reached, and of whose answers the head is kept.

    The packages would read a body to its end, into memory, and use none of it. They keep an exception until their next
    attempt, and it holds the frames that it passed, with all spans of the batch. Both hold each other. By then they are too
    old for a look of the garbage collector: they would stay.
    """

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """Sends a request, and returns the head of its answer."""
        head = requests.Response()
        try:
            with super().request(*args, **{**kwargs, "stream": True}) as answer:
                head.status_code, head.reason, head.headers = answer.status_code, answer.reason, answer.headers
                # Once a short body is read, its connection is used again.
                next(answer.iter_content(SHORT_BYTES), b"")
        except requests.RequestException as error:
            head.status_code, head.reason = HTTPStatus.SERVICE_UNAVAILABLE, str(error)
        return head


class Seldom(logging.Handler):
    """Hands records on to the log, at most one in a while: the packages write one for each attempt to send.

    Args:
        every_s: Shortest time between two records, in seconds.
        clock: The time in seconds.
    """

    def __init__(self, every_s: float = LINES_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._next_s = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        """Hands a record on, or drops it."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            logging.root.handle(record)


class OtlpRecorder:
    """Makes OpenTelemetry spans of requests that have ended."""

    def __init__(self, settings: TracingSettings, version: str, index: int) -> None:
        self._ratio = settings.ratio
        # It warns of each member of a `tracestate` that is none: clients would write our log.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
        packages = logging.getLogger("opentelemetry")
        packages.handlers, packages.propagate = [Seldom()], False
        # A session that an operator names is made by the packages.
        session = None if any(os.environ.get(name) for name in CREDENTIAL_PROVIDERS) else Collector()
        exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=EXPORT_TIMEOUT_S, session=session)
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over what stands here.
        attributes = {"service.name": "tilewire", "service.version": version, "service.instance.id": f"gateway-{index}"}
        resource = Resource.create(attributes).merge(OTELResourceDetector().detect())
        # The choice of recorded requests is made before a span is.
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._provider = provider
        self._tracer = provider.get_tracer("tilewire", version)

    def records(self, parent: TraceParent | None) -> bool:
        """Whether a request is recorded: as its caller decided, else by chance."""
        return is_sampled(parent, self._ratio)

    def record(
        self, spans: Sequence[Span], parent: TraceParent | None, attributes: Mapping[str, str | int], *, is_error: bool
    ) -> str:
        """Takes a request and returns its trace id. Never raises, never waits.

        Args:
            spans: The request itself, whose name is method and route; its stages.
            parent: The caller's span, or None.
            attributes: Attributes of the request's span.
            is_error: The server failed.
        """
        whole, *stages = spans
        root = self._tracer.start_span(
            whole.name,
            context=_context_of(parent),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=whole.began_ns,
        )
        inside = trace.set_span_in_context(root)
        for stage in stages:
            span = self._tracer.start_span(stage.name, context=inside, start_time=stage.began_ns)
            span.end(stage.ended_ns)
        if is_error:
            root.set_status(Status(StatusCode.ERROR))
        root.end(whole.ended_ns)
        return trace.format_trace_id(root.get_span_context().trace_id)

    def close(self) -> None:
        """Sends what is left, for a moment."""
        # A collector that is gone would hold this for half a minute; the thread dies with the process.
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(LAST_EXPORT_S)


def _context_of(parent: TraceParent | None) -> Context:
    """A context with the caller's span, or with none: never what this thread happens to have."""
    if parent is None:
        return trace.set_span_in_context(trace.INVALID_SPAN, Context())
    caller = SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([parent.state]) if parent.state else TraceState(),
    )
    return trace.set_span_in_context(NonRecordingSpan(caller), Context())
