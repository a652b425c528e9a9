"""Who gets a slot of the arena, and when: headroom, turns, time-outs and requests that give up."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator

import pytest

from tilewire.service.errors import DeadlinePassed, TooBusy
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.request.room import HEADROOM, Room, Share
from tilewire.service.ipc.arena import SLOT_ALIGN, Arena, Lease, Segment

KIB = 2**10
CAPACITY = 256 * KIB
FOREVER_S = 600.0
LONE = Share(Flow(1))


@pytest.fixture
def arena() -> Iterator[Arena]:
    segment = Segment.create("test", CAPACITY)
    yield Arena(segment)
    segment.close()


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def waiting(
    room: Room, nbytes: int, share: Share | None = None, *, is_new: bool = True, is_result: bool = False
) -> asyncio.Task[Lease]:
    return asyncio.ensure_future(room.wait(nbytes, share or LONE, is_new=is_new, is_result=is_result))


@pytest.mark.parametrize("nbytes", [1, KIB, CAPACITY // 2, CAPACITY // 2 + 1, CAPACITY])
def test_a_lone_request_gets_all_that_it_needs(arena: Arena, nbytes: int) -> None:
    Room(arena, 0).take(nbytes, LONE, is_new=True).release()
    assert arena.used_bytes == 0


@pytest.mark.parametrize("nbytes", [4 * KIB, 16 * KIB, 100 * KIB, CAPACITY // 2])
def test_requests_of_one_size_leave_room_for_much_smaller_ones(arena: Arena, nbytes: int) -> None:
    room = Room(arena, 0)
    held = [room.take(nbytes, LONE, is_new=True)]
    while arena.free_bytes >= min(HEADROOM * nbytes, nbytes + CAPACITY // 2):
        held.append(room.take(nbytes, LONE, is_new=True))
    with pytest.raises(TooBusy, match="must stay free"):
        room.take(nbytes, LONE, is_new=True)
    room.take(nbytes // HEADROOM, LONE, is_new=True).release()
    # Results come out of what bodies leave free.
    room.take(nbytes, LONE, is_new=False).release()
    for lease in held:
        lease.release()


def test_turns(arena: Arena) -> None:
    async def run() -> None:
        room = Room(arena, FOREVER_S)
        first = room.take(CAPACITY // 2, LONE, is_new=True)
        second, third, fourth = (waiting(room, size * KIB) for size in (128, 127, 64))
        await settle()
        # It would fit, but others of like size came before; one that holds a slot is before them.
        with pytest.raises(TooBusy, match="3 requests wait"):
            room.take(20 * KIB, LONE, is_new=True)
        room.take(20 * KIB, LONE, is_new=False).release()
        # Nobody of that size waits.
        room.take(8 * KIB, LONE, is_new=True).release()
        first.release()
        await settle()
        assert [task.done() for task in (second, third, fourth)] == [True, False, False]
        (await second).release()
        await settle()
        assert [task.done() for task in (third, fourth)] == [True, False]
        (await third).release()
        (await fourth).release()
        assert arena.used_bytes == 0
        assert arena.on_freed is None

    asyncio.run(run())


def test_requests_that_hold_a_slot_are_served_first(arena: Arena) -> None:
    async def run() -> None:
        room = Room(arena, FOREVER_S)
        first = room.take(CAPACITY // 2, LONE, is_new=True)
        new = waiting(room, CAPACITY // 2)
        holder = waiting(room, CAPACITY * 3 // 4, is_new=False)
        await settle()
        first.release()
        await settle()
        assert (new.done(), holder.done()) == (False, True)
        (await holder).release()
        (await new).release()

    asyncio.run(run())


def test_a_request_waits_no_longer_than_the_time_out(arena: Arena) -> None:
    async def run() -> None:
        room = Room(arena, 0.01)
        held = room.take(CAPACITY, LONE, is_new=True)
        with pytest.raises(TooBusy) as caught:
            await room.wait(KIB, LONE, is_new=True)
        assert caught.value.detail == (
            f"no room for 1024 bytes within 0.01 s: 0 of the {CAPACITY} bytes of this gateway's arena are free, "
            "0 in one piece; 1 requests wait"
        )
        held.release()
        assert arena.on_freed is None
        (await room.wait(CAPACITY, LONE, is_new=True)).release()

    asyncio.run(run())


def test_a_request_waits_no_longer_than_its_deadline(arena: Arena) -> None:
    async def run() -> None:
        room = Room(arena, FOREVER_S)
        held = room.take(CAPACITY, LONE, is_new=True)
        for left_s in (0.02, -1.0):
            deadline_ns = time.monotonic_ns() + int(left_s * 1e9)
            with pytest.raises(DeadlinePassed, match="deadline: it passed while"):
                await room.wait(KIB, LONE, is_new=True, deadline_ns=deadline_ns)
        # A time-out that ends before it is what it was.
        with pytest.raises(TooBusy, match="within"):
            await Room(arena, 0.02).wait(KIB, LONE, is_new=True, deadline_ns=time.monotonic_ns() + 10**12)
        held.release()
        # The engine sees to the deadline of one that has room.
        (await room.wait(KIB, LONE, is_new=True, deadline_ns=1)).release()

    asyncio.run(run())


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_request_that_is_cancelled_keeps_nothing_and_lets_the_next_one_in(arena: Arena, is_granted: bool) -> None:
    async def run() -> None:
        room = Room(arena, FOREVER_S)
        held = room.take(CAPACITY // 2, LONE, is_new=True)
        first, second = waiting(room, CAPACITY // 2), waiting(room, CAPACITY // 2 - SLOT_ALIGN)
        await settle()
        if is_granted:
            # In the same turn of the loop: the slot is given, and the task has not yet run.
            held.release()
            first.cancel()
        else:
            first.cancel()
            held.release()
        await settle()
        assert first.cancelled()
        (await second).release()
        assert arena.used_bytes == 0
        assert arena.on_freed is None

    asyncio.run(run())


def test_who_gives_up_does_not_hold_up_those_behind(arena: Arena) -> None:
    async def run() -> None:
        room = Room(arena, FOREVER_S)
        held = room.take(60 * KIB, LONE, is_new=True)
        large, small = waiting(room, CAPACITY), waiting(room, 40 * KIB)
        await settle()
        assert not small.done()
        large.cancel()
        (await small).release()
        held.release()

    asyncio.run(run())


def test_the_flow_that_holds_least_is_served_first(arena: Arena) -> None:
    async def run() -> None:
        room = Room(arena, FOREVER_S)
        flood, quiet, heavy = Share(Flow(1)), Share(Flow(2)), Share(Flow(3, weight=4))
        held = room.take(CAPACITY // 2, flood, is_new=True)
        flood.held_bytes, heavy.held_bytes = CAPACITY // 2, CAPACITY
        tasks = {name: waiting(room, CAPACITY // 2, share) for name, share in (("flood", flood), ("heavy", heavy))}
        await settle()
        tasks["quiet"] = waiting(room, CAPACITY // 2, quiet)
        await settle()
        held.release()
        order = []
        for _ in tasks:
            await settle()
            (name,) = [name for name, task in tasks.items() if task.done() and name not in order]
            order.append(name)
            tasks[name].result().release()
        assert order == ["quiet", "heavy", "flood"]
        assert arena.on_freed is None

    asyncio.run(run())


def test_a_flow_that_holds_less_does_not_wait_behind_others(arena: Arena) -> None:
    async def run() -> None:
        room = Room(arena, FOREVER_S)
        flood, quiet = Share(Flow(1)), Share(Flow(2))
        held = room.take(60 * KIB, flood, is_new=True)
        flood.held_bytes = held.nbytes
        large = waiting(room, CAPACITY, flood)
        await settle()
        with pytest.raises(TooBusy, match="1 requests wait"):
            room.take(40 * KIB, flood, is_new=True)
        room.take(40 * KIB, quiet, is_new=True).release()
        held.release()
        (await large).release()

    asyncio.run(run())


def test_while_the_first_of_a_flow_has_waited_long_further_ones_are_refused_at_once(arena: Arena) -> None:
    async def run() -> None:
        # Half of it is left when one is refused: a busy machine may stand still meanwhile.
        room = Room(arena, 2.0)
        flood, quiet = Share(Flow(1)), Share(Flow(2))
        held = room.take(CAPACITY, flood, is_new=True)
        first = waiting(room, KIB, flood)
        refused_s = math.inf
        loop = asyncio.get_running_loop()
        while not first.done() and refused_s == math.inf:
            began_s = loop.time()
            try:
                async with asyncio.timeout(0.01):
                    await room.wait(KIB, flood, is_new=True)
            except TimeoutError:
                continue
            except TooBusy:
                refused_s = loop.time() - began_s
        # One that waited would have been cancelled after 0.01 s.
        assert refused_s < math.inf
        # Another flow's request waits in its own right, and is served when there is room.
        other = waiting(room, KIB, quiet)
        await settle()
        assert not other.done()
        held.release()
        (await other).release()
        (await first).release()
        assert arena.used_bytes == 0

    asyncio.run(run())


# ── results ───────────────────────────────────────────────────────────────────────────────────────


def test_results_of_one_flow_wait_for_those_that_are_being_read(arena: Arena) -> None:
    """A client that reads slowly holds at most half, and nobody else waits behind it."""

    async def run() -> None:
        room, slow, other = Room(arena, FOREVER_S), Share(Flow(1)), Share(Flow(2))
        first = room.take(CAPACITY // 4, slow, is_new=False, is_result=True)
        second = room.take_now(CAPACITY // 4, slow, is_new=False, is_result=True)
        assert second is not None
        assert slow.result_bytes == CAPACITY // 2
        with pytest.raises(TooBusy, match="of results under way"):
            room.take(KIB, slow, is_new=False, is_result=True)
        assert room.take_now(KIB, slow, is_new=False, is_result=True) is None
        assert room.take_now(KIB, slow, KIB, is_new=True) is None
        third, left = (waiting(room, CAPACITY // 4, slow, is_new=False, is_result=True) for _ in range(2))
        await settle()
        # Bodies of its own, and whatever others ask for, pass.
        for share, is_new in ((slow, True), (other, True), (other, False)):
            passed = await asyncio.wait_for(room.wait(KIB, share, is_new=is_new), 1)
            passed.release()
        result = await asyncio.wait_for(room.wait(CAPACITY // 2, other, is_new=False, is_result=True), 1)
        assert not third.done()
        left.cancel()
        await settle()
        slow.let_go(first)
        first.release()
        granted = await asyncio.wait_for(third, 1)
        assert granted.result_bytes == CAPACITY // 4
        assert slow.result_bytes == CAPACITY // 2
        for lease in (second, result, granted):
            lease.release()

    asyncio.run(run())


def test_a_flow_that_waits_for_itself_is_told_so(arena: Arena) -> None:
    """There is room in the arena, which is no help to it."""

    async def run() -> None:
        room, share = Room(arena, 0.01), Share(Flow(1))
        halves = [room.take(CAPACITY // 4, share, is_new=False, is_result=True) for _ in range(2)]
        with pytest.raises(TooBusy) as raised:
            await room.wait(KIB, share, is_new=False, is_result=True)
        assert raised.value.detail == (
            f"no room for {KIB} bytes within 0.01 s: this client has {CAPACITY // 2} bytes of results under way, "
            "which stay until it has read them"
        )
        for lease in halves:
            lease.release()

    asyncio.run(run())


@pytest.mark.parametrize("nbytes", [CAPACITY // 2 - KIB, CAPACITY // 2, CAPACITY * 3 // 4])
def test_beside_a_result_of_half_or_more_there_is_room_for_small_ones_alone(arena: Arena, nbytes: int) -> None:
    room, share = Room(arena, 0), Share(Flow(1))
    whole = room.take(nbytes, share, is_new=False, is_result=True)
    small = [room.take(CAPACITY // 128, share, is_new=False, is_result=True) for _ in range(2)]
    with pytest.raises(TooBusy, match="of results under way"):
        room.take(1, share, is_new=False, is_result=True)
    for lease in (whole, *small):
        share.let_go(lease)
        lease.release()
    assert (share.result_bytes, share.large_bytes) == (0, 0)


def test_one_result_may_be_all_of_the_arena(arena: Arena) -> None:
    room, share = Room(arena, 0), Share(Flow(1))
    whole = room.take(CAPACITY, share, is_new=False, is_result=True)
    assert share.large_bytes == CAPACITY
    whole.release()


def test_a_result_that_was_granted_to_a_request_that_left_is_not_counted(arena: Arena) -> None:
    async def run() -> None:
        room, share = Room(arena, FOREVER_S), Share(Flow(1))
        held = room.take(CAPACITY, share, is_new=False)
        leaving = waiting(room, KIB, share, is_new=False, is_result=True)
        await settle()
        held.release()
        leaving.cancel()
        await settle()
        assert share.result_bytes == 0
        assert arena.used_bytes == 0

    asyncio.run(run())
