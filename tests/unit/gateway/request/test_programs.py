"""Kept programs: races between a fetch and a change, and which programs stay parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from tests.support.scripted_engines import Scene, ScriptedEngine, answer
from tilewire.service.errors import PreconditionFailed, UnknownName
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.engines.client import Reply
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.request.programs import KeptProgram, Programs
from tilewire.service.gateway.request.room import Room
from tilewire.service.ipc.arena import Arena, Segment
from tilewire.service.ipc.messages import (
    Command,
    DescribeTensor,
    Done,
    GetTensor,
    ListTensors,
    Stored,
    TensorInfo,
    Tensors,
    Timings,
)
from tilewire.service.match import Match
from tilewire.service.ops.op import Limits, TensorType
from tilewire.service.ops.program.definition import parse_program
from tilewire.service.ops.registry import OPS, program_resident

ROOM_BYTES = 2**16


def text_of(shift: float) -> bytes:
    step = b'{"op": "pointwise", "inputs": {"x": "x"}, "options": {"fn": "abs", "shift": %.1f}, "as": "y"}' % shift
    document = b'{"inputs": {"x": {"dtype": "float32", "shape": [-1]}}, "steps": [%s], "outputs": ["y"]}' % step
    return parse_program(document, OPS).text.encode()


OLD, NEW = text_of(1.0), text_of(2.0)


def described(version: int, name: str = "p") -> TensorInfo:
    return TensorInfo(program_resident(name), TensorType("int8", (len(OLD),)), 1.0, version=version, engines=(0,))


class Library(ScriptedEngine):
    """Keeps programs of these names, all with one text, and answers at once."""

    def __init__(self, room: Room, names: Sequence[str]) -> None:
        super().__init__(0)
        self._room = room
        self._infos = {program_resident(name): described(number, name) for number, name in enumerate(names, 1)}

    def send(self, request: Command) -> tuple[int, asyncio.Future[Reply]]:
        number, future = super().send(request)
        if isinstance(request, ListTensors):
            future.set_result(Tensors(0, tuple(self._infos.values())))
        elif isinstance(request, DescribeTensor):
            future.set_result(Tensors(0, (self._infos[request.name],)))
        else:
            assert isinstance(request, GetTensor)
            self._room.arena.segment.view[request.out_offset : request.out_offset + len(OLD)] = OLD
            future.set_result(Done(0, Timings(), stored=Stored(self._infos[request.name])))
        return number, future

    def fetched(self) -> list[str]:
        """Names of the residents that were fetched since the last call."""
        names = [request.name for request in self.sent if isinstance(request, GetTensor)]
        self.sent.clear()
        return names


@pytest.fixture
def room() -> Iterator[Room]:
    segment = Segment.create("test", ROOM_BYTES)
    yield Room(Arena(segment), 0)
    segment.close()


async def fetched_while_replaced(room: Room, match: Match | None) -> KeptProgram:
    """Fetches a program of version 7, which version 8 of the same length replaces behind its description."""
    scene = Scene(0)
    with Admission(room, 8, 0).admit(Flow(1)) as leases:
        task = asyncio.ensure_future(Programs(scene.router, Limits()).fetch("p", leases, match=match))
        message = await answer(scene.engines[0], Tensors(0, (described(7),)))
        assert isinstance(message, GetTensor)
        room.arena.segment.view[message.out_offset : message.out_offset + len(NEW)] = NEW
        sent = await answer(scene.engines[0], Done(0, Timings(), stored=Stored(described(8))))
        if match is not None:
            assert isinstance(sent, DescribeTensor)
            await answer(scene.engines[0], PreconditionFailed("if-match: 'p' has version 8"))
        return await task


def test_a_text_has_the_version_that_it_is(room: Room) -> None:
    assert len(OLD) == len(NEW)
    kept = asyncio.run(fetched_while_replaced(room, None))
    assert kept.op.program.text.encode() == NEW
    assert kept.info == described(8)


def test_a_text_of_another_version_than_demanded_is_refused(room: Room) -> None:
    with pytest.raises(PreconditionFailed):
        asyncio.run(fetched_while_replaced(room, (7,)))


def test_a_program_that_is_deleted_while_all_are_fetched_is_left_out(room: Room) -> None:
    async def run() -> list[KeptProgram]:
        scene = Scene(0)
        with Admission(room, 8, 0).admit(Flow(1)) as leases:
            task = asyncio.ensure_future(Programs(scene.router, Limits()).find_all(leases))
            gone = msgspec.structs.replace(described(3), name=program_resident("a"))
            asked = await answer(scene.engines[0], Tensors(0, (gone, described(7))))
            assert isinstance(asked, DescribeTensor)
            asked = await answer(scene.engines[0], UnknownName(f"name: no resident tensor {asked.name!r}"))
            assert isinstance(asked, DescribeTensor)
            message = await answer(scene.engines[0], Tensors(0, (described(7),)))
            assert isinstance(message, GetTensor)
            room.arena.segment.view[message.out_offset : message.out_offset + len(OLD)] = OLD
            await answer(scene.engines[0], Done(0, Timings(), stored=Stored(described(7))))
            return await task

    assert [kept.name for kept in asyncio.run(run())] == ["p"]


def test_programs_stay_parsed_as_long_as_their_texts_take_no_more_than_the_bound(room: Room) -> None:
    """Whatever their number: a list of more than stay fetches them all again."""
    names = sorted(f"p{number}" for number in range(600))
    library = Library(room, names)

    async def run() -> None:
        programs = Programs(Engines([library]), Limits(), max_cached_bytes=len(OLD) * len(names))
        with Admission(room, 8, 0).admit(Flow(1)) as leases:
            assert [kept.name for kept in await programs.find_all(leases)] == names
            assert library.fetched() == [program_resident(name) for name in names]
            assert [kept.name for kept in await programs.find_all(leases)] == names
            assert library.fetched() == []
            for found in (programs.find(names[0], leases), programs.fetch(names[1], leases)):
                await found
            assert library.fetched() == [program_resident(names[1])]

    asyncio.run(run())


def test_the_programs_that_were_used_longest_ago_do_not_stay(room: Room) -> None:
    library = Library(room, "abc")

    async def run() -> None:
        programs = Programs(Engines([library]), Limits(), max_cached_bytes=2 * len(OLD))
        with Admission(room, 8, 0).admit(Flow(1)) as leases:
            for name in "abacab":
                await programs.find(name, leases)
        assert library.fetched() == [program_resident(name) for name in "abcb"]

    asyncio.run(run())
