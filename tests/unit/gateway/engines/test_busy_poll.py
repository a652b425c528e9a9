"""The busy poller: the loop does not sleep while few answers are due soon, and sleeps otherwise."""

from __future__ import annotations

import asyncio
import time

import pytest

from tilewire.service.gateway.engines.busy_poll import LINGER_S, MAX_OUTSTANDING, BusyPoller


async def cpu_share(seconds: float) -> float:
    """How much of the time this thread works while it waits."""
    began_s, used_s = time.monotonic(), time.thread_time()
    await asyncio.sleep(seconds)
    return (time.thread_time() - used_s) / (time.monotonic() - began_s)


@pytest.mark.parametrize(("outstanding", "polls"), [(1, True), (MAX_OUTSTANDING, True), (MAX_OUTSTANDING + 1, False)])
def test_it_polls_for_few(outstanding: int, polls: bool) -> None:
    async def run() -> None:
        poller = BusyPoller(10.0)
        for _ in range(outstanding):
            poller.sent()
        assert (await cpu_share(0.1) > 0.03) == polls
        poller.answered(outstanding)
        await asyncio.sleep(2 * LINGER_S)
        assert await cpu_share(0.1) < 0.03

    asyncio.run(run())


def test_it_gives_up_after_a_while_and_begins_again() -> None:
    async def run() -> None:
        poller = BusyPoller(0.02)
        poller.sent()
        await asyncio.sleep(0.05)
        assert await cpu_share(0.1) < 0.03
        poller.sent()
        assert await cpu_share(0.015) > 0.03

    asyncio.run(run())


def test_zero_never_polls() -> None:
    async def run() -> None:
        poller = BusyPoller(0)
        poller.sent()
        assert await cpu_share(0.1) < 0.03

    asyncio.run(run())
