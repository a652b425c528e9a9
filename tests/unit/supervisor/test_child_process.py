"""A process that cannot be started, or gets no settings, has died; the supervisor goes on."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager

import pytest
import structlog

from tests.support.no_threads import no_more_threads
from tilewire.service.config.process import EngineSettings, GatewaySettings
from tilewire.service.supervisor.child_process import MAX_UNREADY_DEATHS, Child, Deaths, Spare
from tilewire.service.telemetry.exposition import Exposition, Totals
from tilewire.service.telemetry.history import History

# Ends when its standard input does.
MODULE = "json.tool"


def no_settings(_restarts: int, _was_ready: bool) -> AbstractContextManager[GatewaySettings | EngineSettings]:
    return contextlib.nullcontext()  # type: ignore[return-value]


@pytest.mark.timeout(60)
def test_without_threads_it_dies_and_the_supervisor_does_not() -> None:
    totals = Totals()
    child = Child(
        "engine-0",
        Spare(MODULE, is_wanted=False),
        no_settings,
        totals,
        Deaths(totals),
        Exposition(totals),
        History(totals),
        structlog.get_logger("test"),
        silence_s=0.0,
    )
    with no_more_threads():
        assert asyncio.run(child.run()) != 0
    assert child.failure.startswith(f"engine-0 died {MAX_UNREADY_DEATHS} times before it was ever ready")
