"""What the packages of OpenTelemetry write to the log."""

from __future__ import annotations

import logging

import pytest

from tests.support.clock import Clock
from tilewire.service.gateway.telemetry.otlp import Seldom


def test_a_collector_that_is_gone_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(0.0)
    packages = logging.getLogger(f"{__name__}.packages")
    packages.handlers, packages.propagate = [Seldom(60.0, clock)], False
    for number in range(5):
        packages.warning("attempt %d", number)
        clock.now_s += 30.0
    assert [record.getMessage() for record in caplog.records] == ["attempt 0", "attempt 2", "attempt 4"]
