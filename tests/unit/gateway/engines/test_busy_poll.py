"""The busy poller: the loop does not sleep while few answers are due soon, and sleeps otherwise."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine

import pytest

from tilewire.service.gateway.engines.busy_poll import LINGER_S, MAX_OUTSTANDING, BusyPoller

FEW = 20
"""More turns of the loop than a sleep takes, and far fewer than a loop that does not sleep makes."""


class CountingSelector(selectors.DefaultSelector):
    """Counts the turns of the loop: it asks its selector once in each."""

    turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        return super().select(timeout)


class Loop:
    """An event loop that says whether it slept."""

    def __init__(self) -> None:
        self._selector = CountingSelector()

    def run(self, main: Coroutine[None, None, None]) -> None:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._selector)) as runner:
            runner.run(main)

    async def polls(self, seconds: float) -> bool:
        """Wait; return whether the loop turned all the while."""
        before = self._selector.turns
        await asyncio.sleep(seconds)
        return self._selector.turns - before > FEW


@pytest.mark.parametrize(("outstanding", "polls"), [(1, True), (MAX_OUTSTANDING, True), (MAX_OUTSTANDING + 1, False)])
def test_it_polls_for_few(outstanding: int, polls: bool) -> None:
    loop = Loop()

    async def run() -> None:
        poller = BusyPoller(10.0)
        for _ in range(outstanding):
            poller.sent()
        assert await loop.polls(0.1) == polls
        poller.answered(outstanding)
        await asyncio.sleep(2 * LINGER_S)
        assert not await loop.polls(0.1)

    loop.run(run())


def test_it_gives_up_after_a_while_and_begins_again() -> None:
    loop = Loop()

    async def run() -> None:
        poller = BusyPoller(0.02)
        poller.sent()
        await asyncio.sleep(0.05)
        assert not await loop.polls(0.1)
        poller.sent()
        assert await loop.polls(0.015)

    loop.run(run())


def test_zero_never_polls() -> None:
    loop = Loop()

    async def run() -> None:
        poller = BusyPoller(0)
        poller.sent()
        assert not await loop.polls(0.1)

    loop.run(run())
