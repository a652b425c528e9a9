"""What a collector that cannot be reached costs: a line of the log now and then, and no memory."""

from __future__ import annotations

import gc
import logging
import socket
import weakref
from http import HTTPStatus

import pytest
import requests

from tests.support.clock import Clock
from tilewire.service.gateway.telemetry.otlp import Collector, Seldom


def test_a_collector_that_is_gone_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(0.0)
    packages = logging.getLogger(f"{__name__}.packages")
    packages.handlers, packages.propagate = [Seldom(60.0, clock)], False
    for number in range(5):
        packages.warning("attempt %d", number)
        clock.now_s += 30.0
    assert [record.getMessage() for record in caplog.records] == ["attempt 0", "attempt 2", "attempt 4"]


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
