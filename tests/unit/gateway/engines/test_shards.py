"""Requests on sharded residents, with engines of our own at the Protocol: all parts of one version, or none."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from tests.support.scripted_engines import (
    Held,
    Leaves,
    Scene,
    ScriptedEngine,
    Stays,
    W,
    answer,
    settle,
)
from tilewire.service.errors import (
    ClientGone,
    DeadlinePassed,
    InvalidRequest,
    Lost,
    ResidentQuota,
    TilewireError,
    TooBusy,
    Unavailable,
    UnknownName,
)
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.client import Reply
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.ipc.arena import Lease
from tilewire.service.ipc.board import home_of
from tilewire.service.ipc.messages import (
    AdoptTensor,
    DescribeTensor,
    Done,
    FetchTensor,
    GetTensor,
    InputSpec,
    OutputSpec,
    PutTensor,
    Residing,
    Stale,
    Template,
    TensorInfo,
    Tensors,
    Timings,
    Upload,
)
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.merge import MergeOptions
from tilewire.service.ops.op import OpOptions, TensorType
from tilewire.service.ops.search import SearchOptions
from tilewire.service.placement import Part

A, B, BIAS = TensorType("float32", (4, 8)), TensorType("float32", (8, 11)), TensorType("float32", (11,))
OUT = TensorType("float32", (4, 11))


def sharded(version: int, kind: TensorType = B, axis: int = -1) -> TensorInfo:
    return TensorInfo(W, kind, 1.0, version=version, placement="shard", engines=(0, 1, 2), axis=axis, num_parts=3)


PRODUCT = Template(
    1,
    "matmul",
    (InputSpec("a", A), InputSpec("b", B, W), InputSpec("bias", BIAS)),
    MatmulOptions(),
    (OutputSpec(OUT),),
    1,
    1,
)
OFFSETS = (1024, 4096, 8192)


class Sharded(Scene):
    """Three engines with parts of `W` in version 7."""

    def __init__(self) -> None:
        super().__init__(7, 7, 7)
        self.board.write(W, 7)
        self.slots = Held()

    async def learn(self, info: TensorInfo) -> None:
        """Has the gateway describe the tensor."""
        described = asyncio.ensure_future(self.router.describe(W))
        await answer(self.engines[0], Tensors(0, (info,)))
        await described

    def run(self, template: Template = PRODUCT, offsets: tuple[int, ...] = OFFSETS) -> asyncio.Future[Done | Stale]:
        return asyncio.ensure_future(self.router.compute(template, offsets, Caller(Stays(), self.slots)))


def test_each_engine_computes_its_columns_into_the_one_slot() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))
        task = scene.run()
        await settle()
        begins, widths = (0, 3, 7), (3, 4, 4)
        for engine, begin, width in zip(scene.engines, begins, widths, strict=True):
            (job,) = engine.jobs
            a, b, bias = job.template.inputs
            assert a == InputSpec("a", A)
            part = Part(-1, begin, begin + width)
            assert b == InputSpec("b", TensorType("float32", (8, width)), W, version=7, part=part)
            assert bias == InputSpec("bias", TensorType("float32", (width,)))
            assert job.template.outputs == (OutputSpec(TensorType("float32", (4, width)), pitch=44),)
            assert job.offsets == (1024, 4096 + 4 * begin, 8192 + 4 * begin)
        for number, engine in enumerate(scene.engines):
            assert not task.done()
            await answer(engine, Done(0, Timings(number, kernel_ns=5 - number), number + 1))
        assert await task == Done(0, Timings(2, kernel_ns=5), 3)
        # Equal requests have equal templates.
        again = scene.run()
        await settle()
        for engine in scene.engines:
            assert engine.jobs[0].template is engine.jobs[1].template
            await answer(engine, Done(0, Timings()))
        await again

    asyncio.run(run())


def test_a_replaced_tensor_is_never_mixed() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))
        task = scene.run()
        await answer(scene.engines[0], Done(0, Timings()))
        # The second has a newer version already; the third has still the older one, or none.
        scene.board.write(W, 8)
        await answer(scene.engines[1], Stale(0, (sharded(8),)))
        await answer(scene.engines[2], Done(0, Timings()))
        assert await answer(scene.engines[1], Tensors(0, (sharded(8),))) == DescribeTensor(0, W, 7)
        assert await answer(scene.engines[0], Tensors(0, (sharded(8),))) == DescribeTensor(0, W)
        assert [engine.jobs[-1].template.inputs[1].version for engine in scene.engines] == [8, 8, 8]
        await answer(scene.engines[0], Done(0, Timings()))
        await answer(scene.engines[1], Done(0, Timings()))
        await answer(scene.engines[2], Stale(0, (sharded(7),)))
        # It is awaited until it has followed.
        assert await answer(scene.engines[2], Tensors(0, (sharded(8),))) == DescribeTensor(0, W, 8)
        assert [engine.jobs[-1].template.inputs[1].version for engine in scene.engines] == [8, 8, 8]
        for engine in scene.engines:
            await answer(engine, Done(0, Timings()))
        assert isinstance(await task, Done)

    asyncio.run(run())


def test_a_tensor_of_another_type_is_planned_anew_and_one_in_one_piece_runs_on_one_engine() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7, TensorType("float32", (8, 12))))
        assert await scene.run() == Stale(0, (sharded(7, TensorType("float32", (8, 12))),))
        scene.board.write(W, 8)
        whole = TensorInfo(W, B, 1.0, version=8, engines=(0,))
        task = scene.run()
        assert await answer(scene.engines[0], Tensors(0, (whole,))) == DescribeTensor(0, W)
        await settle()
        assert [len(engine.jobs) for engine in scene.engines] == [1, 0, 0]
        # And the other way round: an engine refuses the whole job for its part.
        scene.board.write(W, 9)
        await answer(scene.engines[0], Stale(0, (sharded(9),)))
        await answer(scene.engines[0], Tensors(0, (sharded(9),)))
        assert [len(engine.jobs) for engine in scene.engines] == [2, 1, 1]
        for engine in scene.engines:
            await answer(engine, Done(0, Timings()))
        assert isinstance(await task, Done)

    asyncio.run(run())


def test_one_part_that_fails_fails_the_request_when_all_have_ended() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))
        # This one is on the device already: nothing cancels it.
        slow = scene.engines[2]
        slow.is_hung = True
        task = scene.run()
        await answer(scene.engines[1], TooBusy("no memory"))
        assert scene.engines[0].cancelled
        assert slow.cancelled
        assert not task.done()
        await answer(slow, Done(0, Timings()))
        with pytest.raises(TooBusy, match="no memory"):
            await task

    asyncio.run(run())


def test_a_part_that_did_not_come_back_is_lost() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))
        task = scene.run()
        lost = Lost(f"b: resident tensor {W!r} was lost with the engine; write it again")
        await answer(scene.engines[0], Done(0, Timings()))
        await answer(scene.engines[1], lost)
        await answer(scene.engines[2], Done(0, Timings()))
        assert await answer(scene.engines[1], Lost(lost.detail.replace("b: ", "name: "))) == DescribeTensor(0, W, 7)
        with pytest.raises(Lost) as caught:
            await task
        assert caught.value.detail == lost.detail

    asyncio.run(run())


def test_a_description_of_a_tensor_without_one_of_its_parts_is_lost() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))

        async def check(last: Reply | TilewireError) -> None:
            task = asyncio.ensure_future(scene.router.check_held(sharded(7)))
            for engine, reply in zip(scene.engines, (Tensors(0, (sharded(7),)),) * 2 + (last,), strict=True):
                assert await answer(engine, reply) == DescribeTensor(0, W, 7)
            await task

        await check(Tensors(0, (sharded(7),)))
        # Deleted meanwhile, or its engine dies.
        await check(UnknownName("name: it is no more"))
        await check(Unavailable("the engine is restarting"))
        with pytest.raises(Lost, match="write it again"):
            await check(Lost(f"name: resident tensor {W!r} was lost with the engine; write it again"))
        scene.engines[2].welcome = None
        task = asyncio.ensure_future(scene.router.check_held(sharded(7)))
        for engine in scene.engines[:2]:
            await answer(engine, Tensors(0, (sharded(7),)))
        await task

    asyncio.run(run())


def test_a_deadline_holds_the_slots_until_all_parts_have_ended() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))
        one, two, three = scene.engines
        two.is_hung = three.is_hung = True
        # The first engine answers before it.
        soon_ns = time.monotonic_ns() + 500_000_000
        task = asyncio.ensure_future(
            scene.router.compute(PRODUCT, OFFSETS, Caller(Stays(), scene.slots, deadline_ns=soon_ns))
        )
        await answer(one, Done(0, Timings()))
        with pytest.raises(DeadlinePassed):
            await task
        assert two.cancelled
        assert three.cancelled
        await answer(two, Done(0, Timings()))
        assert not scene.slots.answered.done()
        await answer(three, Done(0, Timings()))
        assert scene.slots.answered.done()

    asyncio.run(run())


def test_a_deadline_ends_a_request_of_which_one_part_has_not_started() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))
        one, two, three = scene.engines
        one.has_started = two.has_started = three.has_started = True
        past = Caller(Stays(), scene.slots, deadline_ns=time.monotonic_ns())
        task = asyncio.ensure_future(scene.router.compute(PRODUCT, OFFSETS, past))
        await settle()
        for engine in scene.engines:
            await answer(engine, Done(0, Timings()))
        assert isinstance(await task, Done)
        three.has_started = False
        task = asyncio.ensure_future(scene.router.compute(PRODUCT, OFFSETS, past))
        await settle()
        # The parts that have started still write into its slots.
        assert not task.done()
        await answer(one, Done(0, Timings()))
        await answer(two, Done(0, Timings()))
        with pytest.raises(ClientGone, match="cancelled"):
            await task

    asyncio.run(run())


def test_a_client_that_leaves_and_an_engine_that_restarts() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))
        with pytest.raises(ClientGone):
            await scene.router.compute(PRODUCT, OFFSETS, Caller(Leaves(), scene.slots))
        num_jobs = [len(engine.jobs) for engine in scene.engines]
        scene.engines[1].welcome = None
        with pytest.raises(Unavailable, match="b: a part of"):
            await scene.run()
        assert [len(engine.jobs) for engine in scene.engines] == num_jobs

    asyncio.run(run())


def test_residents_in_one_piece_are_brought_to_every_engine_and_cut_there() -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))
        other = "other"
        scene.engines[0].residing = scene.engines[1].residing = scene.engines[2].residing = Residing((7, 7, 7))
        template = msgspec.structs.replace(PRODUCT, inputs=(*PRODUCT.inputs[:2], InputSpec("bias", BIAS, other)))
        index = home_of(other, 3)
        home = scene.engines[index]
        bias = TensorInfo(other, BIAS, 1.0, version=3, placement="single", engines=(index,))
        task = scene.run(template, (1024, 8192))
        assert await answer(home, Tensors(0, (bias,))) == DescribeTensor(0, other)
        assert home.jobs[-1].template.inputs[2].part is not None
        lacking = [engine for engine in scene.engines if engine is not home]
        await answer(home, Done(0, Timings()))
        for engine in lacking:
            await answer(engine, Stale(0, (bias,)))
        for engine in lacking:
            fetched = msgspec.structs.replace(bias, engines=(*bias.engines, scene.engines.index(engine)))
            seen = [message for message in engine.sent if isinstance(message, FetchTensor)]
            while not seen:
                await answer(engine, Tensors(0, (sharded(7),)))
                seen = [message for message in engine.sent if isinstance(message, FetchTensor)]
            assert seen == [FetchTensor(0, other, 3)]
            await answer(engine, Tensors(0, (fetched,)))
        for engine in scene.engines:
            await answer(engine, Done(0, Timings()))
        assert isinstance(await task, Done)

    asyncio.run(run())


def test_the_best_of_all_parts_are_merged_by_one_engine() -> None:
    async def run() -> None:
        scene = Sharded()
        items = TensorType("float32", (11, 8))
        await scene.learn(sharded(7, items, -2))
        outs = (OutputSpec(TensorType("float32", (4, 4))), OutputSpec(TensorType("int64", (4, 4))))
        template = Template(1, "search", (InputSpec("a", A), InputSpec("b", items, W)), SearchOptions(k=4), outs, 1, 1)
        free = scene.slots.arena.free_bytes
        task = scene.run(template, (1024, 8192, 9216))
        await settle()
        jobs = [engine.jobs[-1] for engine in scene.engines]
        # The first has three items only.
        assert [job.options for job in jobs] == [SearchOptions(k=3), SearchOptions(k=4), SearchOptions(k=4)]
        assert [job.template.outputs[1].pitch for job in jobs] == [88] * 3
        values, indices = jobs[0].offsets[1:]
        assert [job.offsets for job in jobs] == [(1024, values + 4 * begin, indices + 8 * begin) for begin in (0, 3, 7)]
        for engine in scene.engines:
            await answer(engine, Done(0, Timings(kernel_ns=2)))
        (engine,) = [engine for engine in scene.engines if len(engine.jobs) == 2]
        merge = engine.jobs[1]
        assert merge.op == "merge"
        assert merge.options == MergeOptions(4, largest=True, is_nan_large=False, parts=((3, 0), (4, 3), (4, 7)))
        assert merge.offsets == (values, indices, 8192, 9216)
        assert merge.template.outputs == outs
        await answer(engine, Done(0, Timings(kernel_ns=3)))
        assert await task == Done(0, Timings(kernel_ns=5))
        assert scene.slots.arena.free_bytes == free

    asyncio.run(run())


def test_an_engine_that_goes_while_there_is_no_room_leaves_no_part_without_its_slots() -> None:
    async def run() -> None:
        scene = Sharded()
        items = TensorType("float32", (11, 8))
        await scene.learn(sharded(7, items, -2))

        class Late(Held):
            async def wait(self, nbytes: int) -> Lease:
                scene.engines[1].welcome = None
                return await super().wait(nbytes)

        scene.slots = Late()
        outs = (OutputSpec(TensorType("float32", (4, 4))), OutputSpec(TensorType("int64", (4, 4))))
        template = Template(1, "search", (InputSpec("a", A), InputSpec("b", items, W)), SearchOptions(k=4), outs, 1, 1)
        task = scene.run(template, (1024, 8192, 9216))
        await settle()
        assert [engine.jobs for engine in scene.engines] == [[], [], []]
        with pytest.raises(Unavailable, match="b: a part of"):
            await task

    asyncio.run(run())


@pytest.mark.parametrize(
    ("op", "options", "inputs", "named"),
    [
        ("matmul", MatmulOptions(), (InputSpec("a", B, W), InputSpec("b", B)), "a: "),
        ("matmul", MatmulOptions(transpose_b=True), (InputSpec("a", A), InputSpec("b", B, W)), "axis=-2"),
        ("matmul", MatmulOptions(), (InputSpec("a", A), InputSpec("b", B), InputSpec("bias", B, W)), "but b is not"),
        ("search", SearchOptions(k=1), (InputSpec("a", A), InputSpec("b", B, W)), "b: .* axis=-2"),
    ],
)
def test_what_needs_more_than_parts_names_the_input(
    op: str, options: OpOptions, inputs: tuple[InputSpec, ...], named: str
) -> None:
    async def run() -> None:
        scene = Sharded()
        await scene.learn(sharded(7))
        with pytest.raises(InvalidRequest, match=named):
            await scene.run(Template(1, op, inputs, options, (OutputSpec(OUT),), 1, 1), (0, 0))
        region = msgspec.structs.replace(PRODUCT, outputs=(OutputSpec(OUT, "region"),))
        with pytest.raises(InvalidRequest, match="out: shared memory"):
            await scene.run(region)

    asyncio.run(run())


# ── uploads and downloads ─────────────────────────────────────────────────────────────────────────


SOURCE = Upload(B, 512)


async def taken(engine: ScriptedEngine, reply: Reply | Exception) -> None:
    assert await answer(engine, reply) == PutTensor(0, W, SOURCE, "shard", -1)  # type: ignore[arg-type]


def test_an_upload_is_ordered_when_all_engines_have_their_parts() -> None:
    async def run() -> None:
        scene = Sharded()
        task = asyncio.ensure_future(scene.router.put(W, SOURCE, "shard", -1))
        held = sharded(0)
        await taken(scene.engines[2], Tensors(0, (held,), ticket=5))
        assert scene.engines[0].sent == []
        await taken(scene.engines[1], Tensors(0, (held,), ticket=4))
        scene.board.write(W, 8)
        await taken(scene.engines[0], Tensors(0, (sharded(8),), replaced=True))
        assert await answer(scene.engines[1], Tensors(0, (sharded(8),))) == AdoptTensor(0, 4, sharded(8))
        # An engine that dies now finds its part in the vault.
        assert not task.done()
        await answer(scene.engines[2], Unavailable("the engine restarted"))
        assert await task == (sharded(8), True)
        scene.run()
        await settle()
        assert [engine.jobs[0].template.inputs[1].version for engine in scene.engines] == [8, 8, 8]

    asyncio.run(run())


@pytest.mark.parametrize("failing", [1, 0])
def test_a_part_without_room_leaves_nothing_behind(failing: int) -> None:
    async def run() -> None:
        scene = Sharded()
        task = asyncio.ensure_future(scene.router.put(W, SOURCE, "shard", -1))
        held = sharded(0)
        if failing:
            await answer(scene.engines[1], ResidentQuota("full"))
        else:
            await answer(scene.engines[1], Tensors(0, (held,), ticket=4))
        await answer(scene.engines[2], Tensors(0, (held,), ticket=5))
        if not failing:
            await answer(scene.engines[0], ResidentQuota("full"))
            assert await answer(scene.engines[1], Tensors(0, (held,))) == AdoptTensor(0, 4, held)
        assert await answer(scene.engines[2], Tensors(0, (held,))) == AdoptTensor(0, 5, held)
        with pytest.raises(ResidentQuota):
            await task
        scene.engines[1].welcome = None
        with pytest.raises(Unavailable, match="takes all engines"):
            await scene.router.put(W, SOURCE, "shard", -1)

    asyncio.run(run())


def test_a_download_is_whole_or_described_anew() -> None:
    async def run() -> None:
        scene = Sharded()
        task = asyncio.ensure_future(scene.router.download(sharded(7), 2048))
        for engine in scene.engines:
            assert await answer(engine, Done(0, Timings())) == GetTensor(0, W, B, 2048, 7)
        assert await task == sharded(7)
        task = asyncio.ensure_future(scene.router.download(sharded(7), 2048))
        await answer(scene.engines[0], Stale(0, (sharded(8),)))
        for engine in scene.engines[1:]:
            await answer(engine, Done(0, Timings()))
        assert await answer(scene.engines[0], Tensors(0, (sharded(8),))) == DescribeTensor(0, W, 7)
        assert await task is None
        # One that needs no parts takes the way of all tensors.
        engine = ScriptedEngine(0)
        put = asyncio.ensure_future(Engines([engine]).put(W, SOURCE, "shard", -1))
        await settle()
        put.cancel()
        assert engine.sent == [PutTensor(0, W, SOURCE, "single")]

    asyncio.run(run())
