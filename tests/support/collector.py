"""An OpenTelemetry collector for tests: an HTTP server that takes OTLP and keeps the spans that it decoded."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

POLL_S = 0.05


class Collector:
    """What came so far.

    Attributes:
        url: Its address, as `--otlp-endpoint` takes it.
        spans: All of them, with the attributes of their resource.
        paths: Of the requests.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[Span, dict[str, str]]] = []
        self.paths: set[str] = set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        """Decodes one export."""
        self.paths.add(path)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {one.key: one.value.string_value for one in group.resource.attributes}
            self.spans += [(span, resource) for scope in group.scope_spans for span in scope.spans]

    def trace(self, request_id: str, timeout_s: float = 30.0) -> list[Span]:
        """The spans of one request, its own first; waits until they have come."""
        end_s = time.monotonic() + timeout_s
        while True:
            for span, _resource in list(self.spans):
                if attributes_of(span).get("tilewire.request_id") == request_id:
                    inside = [other for other, _ in list(self.spans) if other.parent_span_id == span.span_id]
                    return [span, *sorted(inside, key=lambda one: one.start_time_unix_nano)]
            assert time.monotonic() < end_s, f"no span of {request_id}"
            time.sleep(POLL_S)


def attributes_of(span: Span) -> dict[str, str | int]:
    """Strings and integers among a span's attributes."""
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()


def _handler_for(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_args: object) -> None:
            """Says nothing."""

    return Handler
