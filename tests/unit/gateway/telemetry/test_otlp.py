"""What a collector that cannot be reached costs: a line of the log now and then, and no memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import threading
import weakref
from http import HTTPStatus

import pytest
import requests

from tests.support.clock import Clock
from tilewire.service.gateway.telemetry.otlp import Collector, Seldom

# More than two sockets hold that nobody reads.
MAX_SOCKET_BYTES = 2**25


def test_a_collector_that_is_gone_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(0.0)
    packages = logging.getLogger(f"{__name__}.packages")
    packages.handlers, packages.propagate = [Seldom(60.0, clock)], False
    for number in range(5):
        packages.warning("attempt %d", number)
        clock.now_s += 30.0
    assert [record.getMessage() for record in caplog.records] == ["attempt 0", "attempt 2", "attempt 4"]


class Answering:
    """A collector that gives the same answer to each request, whose body goes on and on if it `is_endless`."""

    def __init__(self, door: socket.socket, answer: bytes, *, is_endless: bool) -> None:
        self._door, self._answer, self._is_endless = door, answer, is_endless
        self.url = f"http://127.0.0.1:{door.getsockname()[1]}/v1/traces"
        self.num_connections = 0
        self.sent_bytes = 0
        self.is_left = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._door.accept()
                self.num_connections += 1
                with connection, contextlib.suppress(OSError):
                    while connection.recv(2**16):
                        connection.sendall(self._answer)
                        while self._is_endless and self.sent_bytes < 8 * MAX_SOCKET_BYTES:
                            self.sent_bytes += connection.send(bytes(2**16))
                self.is_left.set()


def test_an_endless_answer_is_not_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, Collector() as session:
        collector = Answering(door, b"HTTP/1.1 200 OK\r\n\r\n", is_endless=True)
        answer = session.request("POST", collector.url, data=b"spans", timeout=5)
        assert answer.status_code == HTTPStatus.OK
        assert collector.is_left.wait(5)
        assert collector.sent_bytes < MAX_SOCKET_BYTES


def test_a_connection_is_used_again_and_the_packages_get_the_head() -> None:
    head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as door, Collector() as session:
        collector = Answering(door, head + b"{}", is_endless=False)
        for _ in range(3):
            answer = session.request("POST", collector.url, data=b"spans", timeout=5)
            assert (answer.status_code, answer.reason) == (HTTPStatus.TOO_MANY_REQUESTS, "Too Many Requests")
            assert answer.headers["retry-after"] == "7"
        assert collector.num_connections == 1


class Batch:
    """Spans that are sent."""


def test_what_was_sent_is_not_held_by_the_outcome() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]

    def send() -> tuple[requests.Response, weakref.ref[Batch]]:
        batch = Batch()
        return Collector().request("POST", f"http://127.0.0.1:{port}/v1/traces", data=b"", timeout=5), weakref.ref(
            batch
        )

    outcome, batch = send()
    assert outcome.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert "refused" in outcome.reason
    gc.collect()
    assert batch() is None
