"""Whom a gateway admits when it is full: flows below their share, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tilewire.service.errors import BodyTooLarge, TooBusy, Unavailable
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.request.admission import MAX_IDLE_FLOWS, Admission, Leases
from tilewire.service.gateway.request.room import Room
from tilewire.service.ipc.arena import Arena, Segment

FLOOD, QUIET, THIRD = Flow(1), Flow(2), Flow(3)


@pytest.fixture
def room() -> Iterator[Room]:
    segment = Segment.create("test", 2**16)
    yield Room(Arena(segment), 0)
    segment.close()


def flood(admission: Admission, flow: Flow) -> list[Leases]:
    held: list[Leases] = []
    with suppress(TooBusy):
        while True:
            held.append(admission.admit(flow))
    return held


def contend(admission: Admission, flow: Flow) -> tuple[list[Leases], list[Leases]]:
    """Lets a flood and another flow take each place that the flood gives back; what either holds at the end."""
    held, others = flood(admission, FLOOD), flood(admission, flow)
    for _ in range(64):
        if held:
            held.pop().release()
        held += flood(admission, FLOOD)
        others += flood(admission, flow)
    return held, others


@pytest.mark.parametrize("max_in_flight", [1, 2, 7])
def test_a_small_limit_is_one_client_s_as_a_whole(room: Room, max_in_flight: int) -> None:
    admission = Admission(room, max_in_flight, 0)
    assert len(flood(admission, FLOOD)) == max_in_flight
    with pytest.raises(TooBusy, match="the queue is full"):
        admission.admit(QUIET)


def test_a_request_that_the_arena_could_never_hold_is_told_of_the_setting(room: Room) -> None:
    limit = r"; a gateway's part of --arena-bytes has 65536 bytes for all of a request$"
    with Admission(room, 2, 2**20).admit(QUIET) as leases:
        with pytest.raises(BodyTooLarge, match=f"^65537 bytes{limit}"):
            asyncio.run(leases.wait(2**16 + 1))
        asyncio.run(leases.wait(2**10))
        with pytest.raises(BodyTooLarge, match=f"^65536 bytes beside the 1024 that the request holds{limit}"):
            asyncio.run(leases.wait(2**16))


def test_a_flood_leaves_places_for_others(room: Room) -> None:
    admission = Admission(room, 64, 0)
    assert len(flood(admission, FLOOD)) == 56
    others = [admission.admit(QUIET) for _ in range(8)]
    with pytest.raises(TooBusy, match="64 requests are under way"):
        admission.admit(QUIET)
    for leases in others:
        leases.release()
    assert len(flood(admission, QUIET)) == 8


def test_places_that_come_back_go_to_whoever_has_less_than_his_share(room: Room) -> None:
    admission = Admission(room, 64, 0)
    held, others = contend(admission, QUIET)
    assert len(others) == 28
    # Both have their share, and a third one still finds a place.
    assert admission.in_flight <= 56 + 8
    if admission.in_flight == 64:
        held.pop().release()
    admission.admit(THIRD)


def test_weights_divide_the_places(room: Room) -> None:
    admission = Admission(room, 64, 0)
    heavy = Flow(4, weight=3)
    _, others = contend(admission, heavy)
    assert len(others) == 42


def test_a_weight_that_changes_under_load_counts_at_once(room: Room) -> None:
    admission = Admission(room, 64, 0)
    held = flood(admission, FLOOD)
    heavier = FLOOD._replace(weight=100)
    for _ in range(100):
        held.pop(0).release()
        held += flood(admission, heavier)
    # It has the share of its weight, and the reserve is left.
    assert len(held) == 56
    assert len(flood(admission, QUIET)) == 1
    for leases in held:
        leases.release()
    assert len(flood(admission, THIRD)) == 55


def test_whoever_has_left_counts_no_more(room: Room) -> None:
    admission = Admission(room, 64, 0)
    for number in range(1000):
        admission.admit(Flow(number)).release()
    assert admission.num_flows <= MAX_IDLE_FLOWS
    assert admission.in_flight == 0
    assert len(flood(admission, FLOOD)) == 56


def test_a_draining_gateway_admits_nobody(room: Room) -> None:
    admission = Admission(room, 64, 0)
    admission.is_draining = True
    with pytest.raises(Unavailable):
        admission.admit(FLOOD)


def test_results_are_those_of_the_flow_until_the_request_has_left(room: Room) -> None:
    admission = Admission(room, 8, 0)
    leases, other = admission.admit(FLOOD), admission.admit(FLOOD)
    assert other.take_now(64) is not None
    # Behind the body there is room for results, too.
    assert leases.take_now(64, 1000) is not None
    result = leases.take_now(2**14, is_result=True)
    assert result is not None
    assert other.take_now(2**14, is_result=True) is None
    leases.give_back(result)
    assert other.take_now(2**14, is_result=True) is not None
    leases.release()
    # All but one are over: that one does not count against itself alone.
    assert other.take_now(2**14, is_result=True) is not None
    other.release()
    assert room.arena.used_bytes == 0
    last = admission.admit(FLOOD)
    assert last.take_now(64) is not None
    assert last.take_now(2**15 + 2**14, is_result=True) is not None
    last.release()
