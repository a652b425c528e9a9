"""Routing over several engines, with engines of our own at the Protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.support.jobs import SentJob
from tilewire.service.errors import (
    ClientGone,
    DeadlinePassed,
    InvalidRequest,
    ResidentQuota,
    TilewireError,
    TooBusy,
    Unavailable,
    UnknownName,
)
from tilewire.service.gateway.auth.flows import NO_FLOW, Flow
from tilewire.service.gateway.engines.client import Reply, Request
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.engines.templates import BoundTemplate
from tilewire.service.ipc.messages import (
    AwaitTensor,
    DeleteTensor,
    Done,
    OutputSpec,
    PutTensor,
    RegionInfo,
    RegionList,
    RegisterRegion,
    Template,
    TensorInfo,
    Tensors,
    Timings,
    UnregisterRegion,
    Upload,
    Warming,
    Welcome,
)
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.op import TensorType

KIND = TensorType("float32", (2,))
JOB = BoundTemplate(Template(1, "add", (), AddOptions(), (OutputSpec(KIND),), 1, 1), (0,))


class ScriptedEngine:
    def __init__(self, index: int, *, is_ready: bool = True) -> None:
        self.welcome = Welcome(index, "cpu", "cpu", "", "", "") if is_ready else None
        self.warming: Warming | None = None
        self.sent: list[Request] = []
        self.jobs: list[SentJob] = []
        self.forgotten: list[int] = []
        self.futures: list[asyncio.Future[Reply]] = []
        self.cancelled: list[int] = []

    @property
    def outstanding(self) -> int:
        return sum(not future.done() for future in self.futures)

    def send(self, request: Request) -> tuple[int, asyncio.Future[Reply]]:
        self.sent.append(request)
        self.futures.append(asyncio.get_running_loop().create_future())
        return len(self.futures) - 1, self.futures[-1]

    def submit(
        self,
        template: Template,
        offsets: tuple[int, ...],
        *,
        deadline_ns: int = 0,
        priority: int = 0,
        flow: Flow = NO_FLOW,
    ) -> tuple[int, asyncio.Future[Reply]]:
        self.jobs.append(SentJob(template, offsets, deadline_ns, priority))
        self.futures.append(asyncio.get_running_loop().create_future())
        return len(self.futures) - 1, self.futures[-1]

    def forget(self, template_id: int) -> None:
        self.forgotten.append(template_id)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        self.futures[request_id].set_exception(ClientGone("cancelled"))


class HungEngine(ScriptedEngine):
    """Answers nothing."""

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)


class Stays:
    """A client that waits for its answer."""

    is_disconnected = False

    def watch(self, on_gone: Callable[[], None]) -> None:
        self.on_gone = on_gone

    def unwatch(self) -> None:
        del self.on_gone


class Held:
    """Slots of a request."""

    def hold_until(self, answered: asyncio.Future[Reply]) -> None:
        self.answered = answered


class Leaves(Stays):
    """A client that is gone before its answer."""

    def watch(self, on_gone: Callable[[], None]) -> None:
        super().watch(on_gone)
        self.is_disconnected = True
        on_gone()


def test_jobs_go_to_the_least_busy_engine_that_is_ready() -> None:
    async def run() -> None:
        one, two, down = ScriptedEngine(0), ScriptedEngine(1), ScriptedEngine(2, is_ready=False)
        engines = Engines([one, two, down])
        tasks = [asyncio.ensure_future(engines.compute(JOB, Stays(), Held())) for _ in range(4)]
        await asyncio.sleep(0)
        assert (len(one.jobs), len(two.jobs), len(down.jobs)) == (2, 2, 0)
        for future in (*one.futures, *two.futures):
            future.set_result(Done(0, Timings()))
        assert len(await asyncio.gather(*tasks)) == 4

    asyncio.run(run())


def test_no_engine_is_503() -> None:
    engines = Engines([ScriptedEngine(0, is_ready=False)])
    assert not engines.is_ready
    with pytest.raises(Unavailable):
        engines.check_ready()


def test_a_client_that_leaves_cancels_its_job_and_waits_for_its_slots() -> None:
    async def run() -> None:
        engine = ScriptedEngine(0)
        with pytest.raises(ClientGone):
            await Engines([engine]).compute(JOB, Leaves(), Held())
        assert engine.cancelled == [0]

    asyncio.run(run())


def test_a_deadline_that_an_engine_lets_pass_ends_the_request_and_its_slots_stay_held() -> None:
    async def run() -> None:
        engine, slots = HungEngine(0), Held()
        with pytest.raises(DeadlinePassed):
            await Engines([engine]).compute(JOB, Stays(), slots, deadline_ns=time.monotonic_ns())
        assert engine.cancelled == [0]
        assert slots.answered is engine.futures[0]
        assert not slots.answered.done()

    asyncio.run(run())


STORED = TensorInfo("w", KIND, 1.0, version=7)


def test_the_home_engine_orders_uploads_and_they_are_answered_when_every_engine_has_them() -> None:
    async def run() -> None:
        home, two, three = (ScriptedEngine(index) for index in range(3))
        task = asyncio.ensure_future(Engines([home, two, three]).put("w", Upload(KIND, 0)))
        await settle()
        assert (home.sent, two.sent, three.sent) == ([PutTensor(0, "w", Upload(KIND, 0))], [], [])
        home.futures[0].set_result(Tensors(0, (STORED,), replaced=True))
        await settle()
        assert (len(home.sent), two.sent, three.sent) == (1, [AwaitTensor(0, "w", 7)], [AwaitTensor(0, "w", 7)])
        two.futures[0].set_result(Tensors(0, ()))
        await settle()
        assert not task.done()
        three.futures[0].set_result(Tensors(0, ()))
        assert await task == (STORED, True)

    asyncio.run(run())


def test_a_deletion_is_answered_when_every_engine_has_it() -> None:
    async def run() -> None:
        home, other = ScriptedEngine(0), ScriptedEngine(1)
        task = asyncio.ensure_future(Engines([home, other]).delete("w"))
        await settle()
        assert (home.sent, other.sent) == ([DeleteTensor(0, "w")], [])
        home.futures[0].set_result(Tensors(0, (STORED,)))
        await settle()
        assert other.sent == [AwaitTensor(0, "w", 7)]
        other.futures[0].set_result(Tensors(0, ()))
        await task

    asyncio.run(run())


def test_a_tensor_that_one_engine_cannot_hold_is_taken_back_by_its_version() -> None:
    async def run() -> None:
        home, other = ScriptedEngine(0), ScriptedEngine(1)
        task = asyncio.ensure_future(Engines([home, other]).put("w", Upload(KIND, 0)))
        await settle()
        home.futures[0].set_result(Tensors(0, (STORED,)))
        await settle()
        other.futures[0].set_exception(TooBusy("no memory on the device"))
        await settle()
        assert home.sent[1:] == [DeleteTensor(0, "w", 7)]
        # Somebody else has replaced it meanwhile.
        home.futures[1].set_exception(UnknownName("replaced"))
        with pytest.raises(TooBusy, match="no memory"):
            await task

    asyncio.run(run())


@pytest.mark.parametrize(
    ("where", "failure"), [("home", ResidentQuota("full")), ("other", Unavailable("the engine restarted"))]
)
def test_an_upload_that_fails_at_home_or_meets_a_restart_changes_nothing_more(
    where: str, failure: TilewireError
) -> None:
    async def run() -> None:
        home, other = ScriptedEngine(0), ScriptedEngine(1)
        task = asyncio.ensure_future(Engines([home, other]).put("w", Upload(KIND, 0)))
        await settle()
        if where == "home":
            home.futures[0].set_exception(failure)
        else:
            home.futures[0].set_result(Tensors(0, (STORED,)))
            await settle()
            other.futures[0].set_exception(failure)
        with pytest.raises(type(failure)):
            await task
        assert (len(home.sent), len(other.sent)) == (1, int(where == "other"))

    asyncio.run(run())


def test_an_upload_waits_for_no_engine_that_would_miss_it() -> None:
    async def run() -> None:
        with pytest.raises(Unavailable):
            await Engines([ScriptedEngine(0), ScriptedEngine(1, is_ready=False)]).put("w", Upload(KIND, 0))

    asyncio.run(run())


REGION = RegionInfo("r", "/key", 0, 10)
STAMPED = RegionInfo("r", "/key", 0, 10, stamp=7, inode=3)


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_the_first_engine_decides_on_a_region_and_the_others_follow() -> None:
    async def run() -> None:
        first, second, third = (ScriptedEngine(index) for index in range(3))
        task = asyncio.ensure_future(Engines([first, second, third]).register_region(REGION))
        await settle()
        assert (first.sent, second.sent, third.sent) == ([RegisterRegion(0, REGION)], [], [])
        first.futures[0].set_result(RegionList(0, (STAMPED,), 7))
        await settle()
        assert second.sent == third.sent == [RegisterRegion(0, STAMPED)]
        for engine in (second, third):
            engine.futures[0].set_result(RegionList(0, (STAMPED,), 7))
        await task

    asyncio.run(run())


def test_what_the_first_engine_refuses_the_others_never_hear_of() -> None:
    async def run() -> None:
        first, second = ScriptedEngine(0), ScriptedEngine(1)
        task = asyncio.ensure_future(Engines([first, second]).register_region(REGION))
        await settle()
        first.futures[0].set_exception(InvalidRequest("name: taken"))
        with pytest.raises(InvalidRequest):
            await task
        assert second.sent == []

    asyncio.run(run())


def test_what_a_later_engine_refuses_is_taken_back_everywhere() -> None:
    async def run() -> None:
        first, second = ScriptedEngine(0), ScriptedEngine(1)
        task = asyncio.ensure_future(Engines([first, second]).register_region(REGION))
        await settle()
        first.futures[0].set_result(RegionList(0, (STAMPED,), 7))
        await settle()
        second.futures[0].set_exception(InvalidRequest("key: replaced"))
        await settle()
        # Only what this registration made: a later one of the same name stays.
        assert first.sent[1] == UnregisterRegion(0, "r", 7)
        first.futures[1].set_result(RegionList(0, (), 7))
        await settle()
        assert second.sent[1] == UnregisterRegion(0, "r", 7)
        second.futures[1].set_result(RegionList(0, (), 7))
        with pytest.raises(InvalidRequest, match="replaced"):
            await task

    asyncio.run(run())


def test_regions_change_only_while_every_engine_is_there() -> None:
    async def run() -> None:
        engines = Engines([ScriptedEngine(0), ScriptedEngine(1, is_ready=False)])
        with pytest.raises(Unavailable):
            await engines.register_region(REGION)
        with pytest.raises(Unavailable):
            await engines.unregister_region(None)

    asyncio.run(run())
