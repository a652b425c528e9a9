"""The load generator measures what is answered in its own time, by a server that answers one request after the other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks.load import Call, run_load

CONNECTIONS = 16

pytestmark = pytest.mark.usefixtures("wrk")


@contextlib.contextmanager
def answering(every_s: float) -> Iterator[tuple[str, list[str]]]:
    """Runs a server; yields its address and the paths in the order of their answers."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            time.sleep(every_s)
            paths.append(self.path)
            with contextlib.suppress(OSError):
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

        def log_message(self, *values: object) -> None:
            """Says nothing."""

    class Server(HTTPServer):
        request_queue_size = 4 * CONNECTIONS

        def handle_error(self, request: object, client_address: object) -> None:
            """Says nothing: wrk leaves with answers under way."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", paths
        finally:
            server.shutdown()
            thread.join()


def call(path: str) -> Call:
    return Call(path, "application/octet-stream", b"")


def test_no_request_of_one_load_takes_time_of_the_next() -> None:
    # What wrk leaves unanswered takes longer than the second load.
    with answering(every_s=0.1) as (url, paths):
        run_load(url, [call("/first")], connections=CONNECTIONS, seconds=1)
        answered = paths.count("/first")
        second = run_load(url, [call("/second")], connections=CONNECTIONS, seconds=1)
        assert second.requests
        assert paths.count("/first") > answered


def test_a_load_without_an_answer_is_no_figure() -> None:
    with answering(every_s=1.5) as (url, _), pytest.raises(RuntimeError, match=r"nothing was answered in \d\.\d s"):
        run_load(url, [call("/slow")], connections=1, seconds=1)
