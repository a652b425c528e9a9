"""A queue that lasts has residents copied to an engine that idles."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.scripted_engines import Scene, W, answer, info, settle
from tilewire.service.errors import ResidentQuota
from tilewire.service.gateway.engines.directory import Directory
from tilewire.service.gateway.engines.locator import Locator
from tilewire.service.gateway.engines.spread import LASTING_S, PAUSE_S, QUEUED, Spread
from tilewire.service.ipc.messages import DescribeTensor, FetchTensor, Tensors

FIELDS = {W: "b"}


class Clock:
    """Time that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Place:
    """A busy engine that holds `W` alone, and an idle one.

    Args:
        queued: Requests that the busy engine has.
    """

    def __init__(self, queued: int = QUEUED) -> None:
        scene = Scene(1, 1)
        self.busy, self.idle = scene.engines
        self.clock = Clock()
        self.directory = Directory(scene.engines, scene.board)
        self.spread = Spread(scene.engines, self.directory, Locator(scene.engines, self.directory), self.clock)
        for _ in range(queued):
            self.busy.futures.append(asyncio.get_running_loop().create_future())

    def note(self, seconds: float, step_s: float = LASTING_S / 2) -> None:
        """Requests that go to the busy engine for some time."""
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self.spread.note(0, FIELDS)
            self.clock.now_s += step_s

    async def describe(self, placement: Any = "single") -> None:
        """The busy engine says what it holds."""
        await settle()
        self.busy.futures[-1].set_result(Tensors(0, (info(1, 0, placement=placement),)))
        await settle()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@in_loop
async def test_a_queue_that_lasts_brings_the_resident_to_the_idle_engine() -> None:
    place = Place()
    place.note(2 * LASTING_S)
    await place.describe()
    assert isinstance(place.busy.sent[-1], DescribeTensor)
    assert await answer(place.idle, Tensors(0, (info(1, 0, 1, placement="single"),))) == FetchTensor(0, W, 1)
    assert [place.directory.serves(index, W) for index in range(2)] == [True, True]
    # Once for a while.
    place.note(PAUSE_S - 2 * LASTING_S)
    await settle()
    assert len(place.idle.sent) == 1


@in_loop
async def test_a_short_queue_or_one_with_pauses_is_left_alone() -> None:
    place = Place()
    place.note(LASTING_S)
    place.clock.now_s += 2 * LASTING_S
    place.note(LASTING_S)
    few = Place(QUEUED - 1)
    few.note(4 * LASTING_S)
    await settle()
    assert place.busy.sent == few.busy.sent == []


@in_loop
async def test_two_busy_engines_keep_what_they_have() -> None:
    place = Place()
    place.idle.futures.append(asyncio.get_running_loop().create_future())
    place.note(4 * LASTING_S)
    await settle()
    assert place.busy.sent == []


@in_loop
async def test_a_replica_is_there_already() -> None:
    place = Place()
    place.note(2 * LASTING_S)
    await place.describe("replicate")
    assert place.idle.sent == []


@in_loop
async def test_without_room_the_resident_stays_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    place = Place()
    place.note(2 * LASTING_S)
    await place.describe()
    await answer(place.idle, ResidentQuota(f"{W}: no room"))
    assert "no room" in caplog.text
    assert not place.directory.serves(1, W)
