"""Kept programs under a race: what is replaced while it is fetched has the version that it is; what is deleted is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.scripted_engines import Scene, answer
from tilewire.service.errors import PreconditionFailed, UnknownName
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.request.programs import KeptProgram, Programs
from tilewire.service.gateway.request.room import Room
from tilewire.service.ipc.arena import Arena, Segment
from tilewire.service.ipc.messages import DescribeTensor, Done, GetTensor, Stored, TensorInfo, Tensors, Timings
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


def described(version: int) -> TensorInfo:
    return TensorInfo(program_resident("p"), TensorType("int8", (len(OLD),)), 1.0, version=version, engines=(0,))


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
