"""Routing over several engines, with engines of our own at the Protocol."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from tests.support.scripted_engines import (
    JOB,
    KIND,
    Held,
    Leaves,
    Scene,
    ScriptedEngine,
    Stays,
    W,
    answer,
    homed,
    info,
    job_of,
    settle,
)
from tilewire.service.errors import (
    ClientGone,
    DeadlinePassed,
    InvalidRequest,
    PreconditionFailed,
    ResidentQuota,
    TilewireError,
    TooBusy,
    Unavailable,
)
from tilewire.service.gateway.engines.asking import VERDICT_TIMEOUT_S
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.ipc.board import home_of, ranking, slot_of
from tilewire.service.ipc.messages import (
    AdoptTensor,
    AwaitCopy,
    DeleteTensor,
    DescribeTensor,
    Done,
    ListTensors,
    OrderTensor,
    OutputSpec,
    PutTensor,
    Refused,
    RegionInfo,
    RegionList,
    RegisterRegion,
    Residing,
    Stale,
    Stored,
    Template,
    Tensors,
    Timings,
    UnregisterRegion,
    Upload,
    Warming,
)
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import Placement


def test_jobs_go_to_the_least_busy_engine_that_is_ready() -> None:
    async def run() -> None:
        one, two, down = ScriptedEngine(0), ScriptedEngine(1), ScriptedEngine(2, is_ready=False)
        engines = Engines([one, two, down])
        tasks = [asyncio.ensure_future(engines.compute(*JOB, Caller(Stays(), Held()))) for _ in range(4)]
        await asyncio.sleep(0)
        assert (len(one.jobs), len(two.jobs), len(down.jobs)) == (2, 2, 0)
        for future in (*one.futures, *two.futures):
            future.set_result(Done(0, Timings()))
        assert len(await asyncio.gather(*tasks)) == 4

    asyncio.run(run())


def test_a_version_of_a_file_is_taken_from_the_engine_that_read_it() -> None:
    """Files have no version but their time, and engines that start later read what is there by then."""

    async def run() -> None:
        first, second = (msgspec.structs.replace(info(0, engine), created=1.0 + engine) for engine in (0, 1))
        template, offsets = job_of(W)
        for wanted, ends in ((second, True), (msgspec.structs.replace(first, created=9.0), False)):
            scene = Scene(0, 0)
            pinned = tuple(msgspec.structs.replace(one, version=wanted.tag) for one in template.inputs)
            job = msgspec.structs.replace(template, inputs=pinned), offsets
            task = asyncio.ensure_future(scene.router.compute(*job, Caller(Stays(), Held())))
            await answer(scene.engines[0], Stale(0, (first,)))
            await answer(scene.engines[1], Done(0, Timings()) if ends else Stale(0, (second,)))
            assert await task == (Done(0, Timings()) if ends else Stale(0, (second,)))
            assert [len(engine.jobs) for engine in scene.engines] == [1, 1]

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
            await Engines([engine]).compute(*JOB, Caller(Leaves(), Held()))
        assert engine.cancelled == [0]

    asyncio.run(run())


def test_a_deadline_that_an_engine_lets_pass_ends_the_request_and_its_slots_stay_held() -> None:
    async def run() -> None:
        engine, slots = ScriptedEngine(0, is_hung=True), Held()
        with pytest.raises(DeadlinePassed):
            await Engines([engine]).compute(*JOB, Caller(Stays(), slots, deadline_ns=time.monotonic_ns()))
        assert engine.cancelled == [0]
        assert slots.answered is engine.futures[0]
        assert not slots.answered.done()

    asyncio.run(run())


def test_a_job_that_has_started_by_its_deadline_is_awaited() -> None:
    async def run() -> None:
        engine = ScriptedEngine(0, has_started=True)
        caller = Caller(Stays(), Held(), deadline_ns=time.monotonic_ns())
        task = asyncio.ensure_future(Engines([engine]).compute(*JOB, caller))
        # Longer than an engine may say nothing.
        await asyncio.sleep(2 * VERDICT_TIMEOUT_S)
        assert engine.cancelled == [0]
        assert not task.done()
        await answer(engine, Done(0, Timings()))
        assert await task == Done(0, Timings())

    asyncio.run(run())


def test_an_upload_is_answered_by_its_home_alone() -> None:
    async def run() -> None:
        scene = Scene(0, 0, 0)
        scene.engines[2].welcome = None
        task = asyncio.ensure_future(scene.router.put(W, Upload(KIND, 0)))
        assert await answer(scene.engines[0], Tensors(0, (info(7, 0),), replaced=True)) == PutTensor(
            0, W, Upload(KIND, 0), "replicate"
        )
        assert await task == (info(7, 0), True)
        assert scene.engines[1].sent == []
        deleting = asyncio.ensure_future(scene.router.delete(W))
        assert await answer(scene.engines[0], Tensors(0, (info(8, 0),))) == DeleteTensor(0, W)
        await deleting
        scene.engines[0].welcome = None
        for change in (scene.router.put(W, Upload(KIND, 0)), scene.router.delete(W)):
            with pytest.raises(Unavailable):
                await change

    asyncio.run(run())


def test_only_engines_with_the_last_change_serve_a_name() -> None:
    async def run() -> None:
        scene = Scene(0, 6, 7)
        scene.board.write(W, 7)
        for _ in range(4):
            scene.compute(W)
        await settle()
        assert [len(one.jobs) for one in scene.engines] == [2, 0, 2]
        # It has followed: from now on it serves, too.
        scene.engines[1].residing = Residing((7, 7, 7))
        for _ in range(2):
            scene.compute(W)
        await settle()
        assert [len(one.jobs) for one in scene.engines] == [2, 2, 2]
        # Another change, that only its home has.
        scene.board.write(W, 8)
        scene.compute(W)
        await settle()
        assert [len(one.jobs) for one in scene.engines] == [3, 2, 2]
        # Others are not concerned.
        scene.compute(homed("other", 1, 3))
        await settle()
        assert [len(one.jobs) for one in scene.engines] == [3, 3, 2]

    asyncio.run(run())


def test_a_name_is_served_while_its_home_restarts_by_those_that_have_its_last_change() -> None:
    async def run() -> None:
        scene = Scene(0, 6, 7)
        scene.board.write(W, 7)
        scene.engines[0].welcome = None
        task = scene.compute(W)
        await answer(scene.engines[2], Done(0, Timings()))
        assert isinstance(await task, Done)
        scene.board.write(W, 8)
        with pytest.raises(Unavailable, match="restarting"):
            await scene.compute(W)

    asyncio.run(run())


def test_with_a_store_only_the_home_engine_refuses_a_version() -> None:
    """Another one may have what was replaced on another host a moment ago."""

    async def run(*, has_store: bool) -> None:
        scene = Scene(7, 7, 7)
        scene.board.write(W, 7)
        scene.engines[0].welcome = None
        for engine in scene.engines[1:]:
            assert engine.welcome is not None
            engine.welcome = msgspec.structs.replace(engine.welcome, has_store=has_store)
        task = asyncio.ensure_future(scene.router.describe(W, match=(9,)))
        asked = scene.engines[ranking(slot_of(W), 3)[1]]
        await answer(asked, Tensors(0, (info(7, 0, 1, 2),)))
        with pytest.raises(Unavailable if has_store else PreconditionFailed):
            await task

    asyncio.run(run(has_store=False))
    asyncio.run(run(has_store=True))


def test_a_tensor_on_one_engine_is_found_there() -> None:
    async def run() -> None:
        scene = Scene(0, 7, 7)
        scene.board.write(W, 7)
        single = info(7, 2, placement="single")
        task = scene.compute(W)
        await answer(scene.engines[0], Stale(0, (single,)))
        assert await answer(scene.engines[0], Tensors(0, (single,))) == DescribeTensor(0, W)
        # Its home has ordered it; the engine that holds it may not have its version yet, and has the older one.
        others = [scene.compute(W) for _ in range(2)]
        await settle()
        assert [len(one.jobs) for one in scene.engines] == [1, 0, 0]
        assert await answer(scene.engines[2], Tensors(0, (single,))) == DescribeTensor(0, W, 7)
        assert [len(one.jobs) for one in scene.engines] == [1, 0, 1]
        await answer(scene.engines[2], Done(0, Timings()))
        assert isinstance(await task, Done)
        for other in others:
            other.cancel()
        await settle()
        scene.engines[0].futures.clear()
        scene.engines[2].futures.clear()
        # It is remembered, also when a name of the same slot changes and the engine follows.
        for _ in range(3):
            scene.compute(W)
        await settle()
        assert [len(one.jobs) for one in scene.engines] == [1, 0, 4]
        scene.engines[2].welcome = None
        task = scene.compute(W)
        assert await answer(scene.engines[0], Tensors(0, (single,))) == DescribeTensor(0, W)
        with pytest.raises(Unavailable, match="holds"):
            await task

    asyncio.run(run())


def test_an_engine_without_the_tensor_is_tried_again_when_it_has_followed() -> None:
    async def run() -> None:
        scene = Scene(0, 7)
        scene.board.write(W, 7)
        task = scene.compute(W)
        await answer(scene.engines[0], Stale(0, (info(7, 1),)))
        await answer(scene.engines[1], Done(0, Timings()))
        await task
        for _ in range(2):
            scene.compute(W)
        await settle()
        assert [len(one.jobs) for one in scene.engines] == [1, 3]
        scene.engines[0].residing = Residing((7, 0))
        scene.compute(W)
        await settle()
        assert [len(one.jobs) for one in scene.engines] == [2, 3]

    asyncio.run(run())


def test_a_resident_of_another_type_goes_back_to_be_planned() -> None:
    async def run() -> None:
        scene = Scene(0, 0)
        task = scene.compute(W)
        other = info(7, 0, kind=TensorType("float32", (3,)))
        await answer(scene.engines[0], Stale(0, (other,)))
        assert await task == Stale(0, (other,))
        assert not scene.router.are_current([(W, KIND)])

    asyncio.run(run())


def test_a_stored_result_gets_its_version_from_its_home_and_stays_where_it_is() -> None:
    async def run() -> None:
        scene = Scene(0, 0)
        scene.engines[0].futures = [asyncio.get_running_loop().create_future()]
        stored = Template(1, "add", (), AddOptions(), (OutputSpec(KIND, None, W, True),), 1, 1)
        task = asyncio.ensure_future(scene.router.compute(stored, (), Caller(Stays(), Held())))
        held, ordered = info(0, 1), info(7, 1)
        assert await answer(scene.engines[1], Done(0, Timings(), 1, Stored(held, 5))) == AwaitCopy(0, 5)
        scene.engines[0].futures[0].cancel()
        assert scene.engines[0].sent == []
        await answer(scene.engines[1], Tensors(0, (held,)))
        assert await answer(scene.engines[0], Tensors(0, (ordered,), replaced=True)) == OrderTensor(0, held, 5)
        assert not task.done()
        assert await answer(scene.engines[1], Tensors(0, (ordered,))) == AdoptTensor(0, 5, ordered)
        assert await task == Done(0, Timings(), 1, Stored(ordered, 0, replaced=True))
        scene.board.write(W, 7)
        scene.compute(W)
        await settle()
        assert len(scene.engines[1].jobs) == 2

    asyncio.run(run())


def test_a_result_whose_home_is_gone_is_dropped() -> None:
    async def run() -> None:
        scene = Scene(0, 0)
        scene.engines[0].welcome = None
        task = asyncio.ensure_future(scene.router.compute(*job_of(), Caller(Stays(), Held())))
        held = info(0, 1)
        assert await answer(scene.engines[1], Done(0, Timings(), 1, Stored(held, 5))) == AdoptTensor(0, 5, held)
        await answer(scene.engines[1], Tensors(0, (held,)))
        with pytest.raises(Unavailable):
            await task

    asyncio.run(run())


@pytest.mark.parametrize("error", [Unavailable("gone"), PreconditionFailed("other")])
def test_a_holder_learns_whether_its_tensor_may_have_been_ordered(error: TilewireError) -> None:
    async def run() -> None:
        scene = Scene(0, 0)
        busy = scene.engines[0].futures = [asyncio.get_running_loop().create_future()]
        task = asyncio.ensure_future(scene.router.compute(*job_of(), Caller(Stays(), Held())))
        held = info(0, 1)
        await answer(scene.engines[1], Done(0, Timings(), 1, Stored(held, 5)))
        busy[0].cancel()
        await answer(scene.engines[0], error)
        dropped = await answer(scene.engines[1], Tensors(0, (held,)))
        assert dropped == AdoptTensor(0, 5, held, is_unsure=isinstance(error, Unavailable))
        with pytest.raises(type(error)):
            await task

    asyncio.run(run())


def test_a_single_tensor_goes_to_the_first_engine_in_its_order_that_has_room() -> None:
    async def run() -> None:
        scene = Scene(0, 0)
        task = asyncio.ensure_future(scene.router.put(W, Upload(KIND, 0), "single"))
        held, ordered = info(0, 1, placement="single"), info(7, 1, placement="single")
        await answer(scene.engines[0], ResidentQuota("full"))
        sent = await answer(scene.engines[1], Tensors(0, (held,), ticket=5))
        assert sent == PutTensor(0, W, Upload(KIND, 0), "single")
        await answer(scene.engines[0], Tensors(0, (ordered,)))
        await answer(scene.engines[1], Tensors(0, (ordered,)))
        assert await task == (ordered, False)

    asyncio.run(run())


@pytest.mark.parametrize(("nbytes", "placement"), [(64, "replicate"), (68, "single")])
def test_what_is_small_is_replicated_unless_the_client_says_otherwise(nbytes: int, placement: Placement) -> None:
    async def run() -> None:
        scene = Scene(0, 0, quota=1024)
        source = Upload(TensorType("float32", (nbytes // 4,)), 0)
        task = asyncio.ensure_future(scene.router.put(W, source))
        assert await answer(scene.engines[0], Tensors(0, (info(7, 0),))) == PutTensor(0, W, source, placement)
        await task

    asyncio.run(run())


def test_the_list_says_what_is_where() -> None:
    async def run() -> None:
        scene = Scene(0, 9, 9)
        here = msgspec.structs.replace(info(7, 0), hits=2, last_used=5.0)
        copy = msgspec.structs.replace(info(7, 0, 1), hits=3, last_used=4.0)
        old = msgspec.structs.replace(info(3, 2), hits=9)
        task = asyncio.ensure_future(scene.router.infos())
        for engine, infos in zip(scene.engines, [(here,), (copy,), (old,)], strict=True):
            await answer(engine, Tensors(0, infos))
        assert await task == [msgspec.structs.replace(info(7, 0, 1), hits=5, last_used=5.0)]
        # Without its home: the engine that has followed it furthest decides. What a dead engine holds is listed.
        scene.engines[0].welcome = None
        task = asyncio.ensure_future(scene.router.infos())
        await answer(scene.engines[1], Tensors(0, (info(7, 0, placement="single"),)))
        await answer(scene.engines[2], Tensors(0, ()))
        assert await task == [info(7, 0, placement="single")]

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2])
def test_a_list_in_parts_is_one_list(count: int) -> None:
    async def run() -> None:
        scene = Scene(*[9] * count)
        named = [msgspec.structs.replace(info(number, 0), name=f"w/{number}") for number in range(1, 4)]
        newer = msgspec.structs.replace(named[0], version=4)
        task = asyncio.ensure_future(scene.router.infos("w/"))
        for other in scene.engines[1:]:
            await answer(other, Tensors(0, ()))
        assert await answer(scene.engines[0], Tensors(0, (named[2], named[0]), next=3)) == ListTensors(0, "w/", 3)
        # One was replaced meanwhile.
        await answer(scene.engines[0], Tensors(0, (named[1], newer)))
        homed_here = [one for one in (newer, *named[1:]) if home_of(one.name, count) == 0]
        assert await task == homed_here

    asyncio.run(run())


@pytest.mark.parametrize("failure", [ResidentQuota("full"), TooBusy("no memory on the device")])
def test_an_upload_that_fails_changes_nothing_more(failure: TilewireError) -> None:
    async def run() -> None:
        scene = Scene(0, 0)
        task = asyncio.ensure_future(scene.router.put(W, Upload(KIND, 0)))
        await answer(scene.engines[0], failure)
        with pytest.raises(type(failure)):
            await task
        assert (len(scene.engines[0].sent), len(scene.engines[1].sent)) == (1, 0)

    asyncio.run(run())


REGION = RegionInfo("r", "/key", 0, 10)
STAMPED = RegionInfo("r", "/key", 0, 10, stamp=7, inode=3)


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


def test_the_reason_why_no_engine_is_ready() -> None:
    warming, refusing, ready = ScriptedEngine(0, is_ready=False), ScriptedEngine(1, is_ready=False), ScriptedEngine(2)
    assert Engines([warming, refusing]).why_not_ready == "no engine is ready: starting or restarting"
    refusing.warming = Refused("no memory")
    assert Engines([warming, refusing]).why_not_ready == "no engine is ready: no memory"
    warming.warming = Warming("cuda:0", "load", 1, 2)
    assert Engines([warming, refusing]).why_not_ready == "no engine is ready: warming up"
    assert Engines([warming, refusing, ready]).why_not_ready is None
