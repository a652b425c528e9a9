"""The scheduler's promises: order, no loss, nothing late or discarded is run, no mixing of keys, no starvation, fair flows."""

from __future__ import annotations

import time
import tracemalloc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewire.service.engine.loop.scheduler import DEFAULT_RANK, JOB_S, MAX_IDLE_FLOWS, Caps, Scheduler, Waiting

JOBS = st.lists(
    st.tuples(
        st.integers(0, 3),  # priority
        st.sampled_from([None, "x", "y"]),  # key
        st.integers(0, 10),  # deadline
        st.integers(1, 5),  # rows
        st.booleans(),  # discarded while it waits
        st.integers(0, 2),  # flow
    ),
    max_size=30,
)
CAPS = Caps(max_requests=4, max_rows=8)
Job = tuple[int, str | None, int, int, bool, int]


class Numbered(Waiting, eq=False):
    number: int = 0


def fill(jobs: list[Job]) -> tuple[Scheduler[Numbered], list[Numbered]]:
    scheduler: Scheduler[Numbered] = Scheduler(CAPS)
    waiting = [
        Numbered(number=number, key=key, deadline_ns=deadline, priority=priority, rows=rows, flow=flow)
        for number, (priority, key, deadline, rows, _, flow) in enumerate(jobs)
    ]
    for one in waiting:
        scheduler.add(one)
    for one, (*_, is_discarded, _flow) in zip(waiting, jobs, strict=True):
        if is_discarded:
            assert scheduler.discard(one)
            assert not scheduler.discard(one)
    return scheduler, waiting


@given(JOBS)
@settings(deadline=None)
def test_every_job_ends_once_as_it_should(jobs: list[Job]) -> None:
    scheduler, waiting = fill(jobs)
    ran: list[int] = []
    expired: list[int] = []
    assert len(scheduler) == sum(not is_discarded for *_, is_discarded, _ in jobs)
    for now_ns in range(1, len(jobs) + 2):
        decision = scheduler.decide(now_ns)
        expired += [one.number for one in decision.expired]
        assert all(0 < one.deadline_ns < now_ns for one in decision.expired)
        assert not any(0 < one.deadline_ns < now_ns for one in decision.batch)
        keys = {one.key for one in decision.batch}
        assert len(keys) <= 1
        assert keys != {None} or len(decision.batch) == 1
        assert len(decision.batch) <= CAPS.max_requests
        assert len(decision.batch) <= 1 or sum(one.rows for one in decision.batch) <= CAPS.max_rows
        ran += [one.number for one in decision.batch]
        if not len(scheduler):
            break
    assert len(scheduler) == 0
    discarded = [number for number, (*_, is_discarded, _) in enumerate(jobs) if is_discarded]
    assert sorted([*ran, *expired, *discarded]) == list(range(len(waiting)))


@given(JOBS)
@settings(deadline=None)
def test_in_one_flow_the_most_urgent_and_oldest_leads_and_keys_keep_their_order(
    jobs: list[Job],
) -> None:
    scheduler, waiting = fill([(*job[:2], 0, *job[3:5], 0) for job in jobs])
    left = [one for one, job in zip(waiting, jobs, strict=True) if not job[4]]
    while left:
        order = sorted(left, key=lambda one: (one.priority or DEFAULT_RANK, one.number))
        batch = scheduler.decide(1).batch
        assert batch[0] is order[0]
        same = [one for one in order if one is batch[0] or (one.key is not None and one.key == batch[0].key)]
        assert batch == same[: len(batch)]
        left = [one for one in left if one not in batch]
    assert scheduler.decide(1).batch == []


def test_a_rare_key_is_served_when_it_is_the_oldest() -> None:
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=2))
    for _ in range(3):
        scheduler.add(Waiting(key="common"))
    scheduler.add(Waiting(key="rare"))
    seen = []
    for _ in range(6):
        scheduler.add(Waiting(key="common"))
        seen.append([one.key for one in scheduler.decide(0).batch])
    assert ["rare"] in seen[:3]


@given(JOBS)
@settings(deadline=None)
def test_each_flow_keeps_its_own_order(jobs: list[Job]) -> None:
    scheduler, _ = fill([(job[0], "x", 0, job[3], False, job[5]) for job in jobs])
    ran: list[Numbered] = []
    while len(scheduler):
        ran += scheduler.decide(1).batch
    for flow in range(3):
        own = [one for one in ran if one.flow == flow]
        assert own == sorted(own, key=lambda one: (one.priority or DEFAULT_RANK, one.number))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=60),
    st.dictionaries(st.integers(0, 2), st.integers(1, 3), min_size=3, max_size=3),
    st.booleans(),
)
@settings(deadline=None)
def test_while_two_flows_wait_neither_gets_more_than_a_batch_beyond_its_share(
    jobs: list[tuple[int, int]], weights: dict[int, int], is_joined: bool
) -> None:
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=4))
    left = dict.fromkeys(range(3), 0.0)
    for flow, cost in jobs:
        one = Waiting(key="x" if is_joined else None, seconds=cost * 1e-4, flow=flow, weight=weights[flow])
        left[flow] += one.cost_s
        scheduler.add(one)
    used = dict.fromkeys(range(3), 0.0)
    batch_s = 4 * (4e-4 + JOB_S)
    while len(scheduler):
        for one in scheduler.decide(0).batch:
            used[one.flow] += one.cost_s
        # Time divided by weight: equal for all that still have jobs.
        busy = [used[flow] for flow in used if left[flow] - used[flow] > 1e-9]
        assert max(busy, default=0) - min(busy, default=0) <= batch_s


@pytest.mark.parametrize("key", [None, "x"])
@pytest.mark.parametrize("priority", [0, 1])
def test_a_flood_of_one_flow_delays_another_by_a_batch(key: str | None, priority: int) -> None:
    """Whatever priority the flood gives itself, and whether the jobs share launches or not."""
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=8))
    for _ in range(1000):
        scheduler.add(Waiting(key=key, flow=1, priority=priority, seconds=1e-3))
    scheduler.decide(0)
    for _ in range(20):
        quiet = Waiting(key=key, flow=2, seconds=1e-3)
        scheduler.add(quiet)
        ran = [one for _ in range(2) for one in scheduler.decide(0).batch]
        assert quiet in ran


def test_weights_divide_the_device() -> None:
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=4))
    for flow, weight in ((1, 1), (2, 3)):
        for _ in range(400):
            scheduler.add(Waiting(key="x", flow=flow, weight=weight, seconds=1e-3))
    ran = [one.flow for _ in range(100) for one in scheduler.decide(0).batch]
    assert ran.count(2) == pytest.approx(3 * ran.count(1), rel=0.05)


@pytest.mark.parametrize("waits", [1, 8])
@pytest.mark.parametrize("key", [None, "x"])
def test_flows_share_the_time_that_jobs_take_not_what_was_estimated(key: str | None, waits: int) -> None:
    """Jobs that come again when they are answered; those of one flow take twenty times their estimate."""
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=4))
    takes_s = {1: 1e-3, 2: 20e-3}
    used_s = dict.fromkeys(takes_s, 0.0)
    for flow in takes_s:
        for _ in range(waits):
            scheduler.add(Waiting(key=key and key * flow, flow=flow, seconds=1e-3))
    for _ in range(1000):
        batch = scheduler.decide(0).batch
        flow = batch[0].flow
        seconds = takes_s[flow] * len(batch)
        scheduler.settle(batch, seconds)
        used_s[flow] += seconds
        for _ in batch:
            scheduler.add(Waiting(key=key and key * flow, flow=flow, seconds=1e-3))
    assert used_s[2] == pytest.approx(used_s[1], rel=0.1)


def test_a_flow_that_was_alone_owes_nothing_to_one_that_comes() -> None:
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=1))
    for _ in range(100):
        scheduler.add(Waiting(flow=1, seconds=1e-3))
        scheduler.settle(scheduler.decide(0).batch, 1.0)
    for flow in (1, 2):
        for _ in range(20):
            scheduler.add(Waiting(flow=flow, seconds=1e-3))
    ran = [scheduler.decide(0).batch[0].flow for _ in range(20)]
    assert ran.count(1) == pytest.approx(10, abs=1)


def test_an_idle_flow_saves_nothing_up() -> None:
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=1))
    for _ in range(1000):
        scheduler.add(Waiting(flow=1, seconds=1e-3))
    for _ in range(500):
        scheduler.decide(0)
    for _ in range(100):
        scheduler.add(Waiting(flow=2, seconds=1e-3))
    ran = [scheduler.decide(0).batch[0].flow for _ in range(20)]
    assert ran.count(1) == 10


def test_flows_that_are_gone_are_forgotten() -> None:
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=2))
    for flow in range(100):
        scheduler.add(Waiting(key="x", flow=flow))
    while len(scheduler):
        scheduler.decide(0)
    scheduler.decide(0)
    assert scheduler.num_flows == 0


def test_flows_that_come_once_are_forgotten_and_the_greedy_one_is_not() -> None:
    """Each is served at once and stays idle, as clients of ever new addresses do."""
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=1))
    greedy, new, waiting = 0, 1, 10 * MAX_IDLE_FLOWS
    scheduler.add(Waiting(flow=greedy, seconds=1.0))
    scheduler.decide(0)
    for flow in range(new, waiting):
        scheduler.add(Waiting(flow=flow))
        assert [one.flow for one in scheduler.decide(0).batch] == [flow]
        assert scheduler.num_flows <= MAX_IDLE_FLOWS + 2
    scheduler.add(Waiting(flow=greedy))
    for flow in range(waiting, waiting + 2 * MAX_IDLE_FLOWS):
        scheduler.add(Waiting(flow=flow))
    served = [one.flow for _ in range(2 * MAX_IDLE_FLOWS + 1) for one in scheduler.decide(0).batch]
    assert sorted(served[:-1]) == list(range(waiting, waiting + 2 * MAX_IDLE_FLOWS))
    assert served[-1] == greedy


class Held(Waiting, eq=False, weakref=True):
    """Says whether it is still held."""


@pytest.mark.parametrize("how", ["discarded", "late"])
def test_jobs_that_never_ran_are_forgotten(how: str) -> None:
    scheduler: Scheduler[Waiting] = Scheduler()
    gone = []
    for number in range(100):
        # Each with a key of its own, as clients with other shapes each time have.
        one = Held(key=number, deadline_ns=1 if how == "late" else 0)
        scheduler.add(one)
        gone.append(weakref.ref(one))
        if how == "discarded":
            assert scheduler.discard(one)
        del one
        scheduler.add(Waiting(key="x"))
        decision = scheduler.decide(2)
        assert [one.key for one in decision.batch] == ["x"]
        assert len(decision.expired) == (how == "late")
        del decision
    assert [one() for one in gone] == [None] * 100


@pytest.mark.parametrize("key", [None, "x"])
def test_jobs_that_ran_are_forgotten_at_once(key: str | None) -> None:
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=2))
    gone = []
    for number in range(6):
        one = Held(key=key, priority=number)
        scheduler.add(one)
        gone.append(weakref.ref(one))
        del one
    while len(scheduler):
        scheduler.decide(0)
        assert sum(one() is not None for one in gone) <= 2 * len(scheduler)
    assert [one() for one in gone] == [None] * 6


@given(JOBS, st.booleans(), st.sets(st.integers(0, 29)))
@settings(deadline=None)
def test_waiting_for_batches_and_passing_long_jobs_loses_none(
    jobs: list[Job], without_long: bool, long: set[int]
) -> None:
    scheduler: Scheduler[Numbered] = Scheduler(Caps(max_requests=4, max_rows=8, max_queue_delay_ns=3))
    waiting = [
        Numbered(number=number, key=key, deadline_ns=deadline, priority=priority, rows=rows, flow=flow)
        for number, (priority, key, deadline, rows, _, flow) in enumerate(jobs)
    ]
    for one in waiting:
        one.seconds = float(one.number in long)
        scheduler.add(one)
    ended: list[int] = []
    for now_ns in range(1, len(jobs) + 12):
        # Long jobs wait for half the time, if at all.
        decision = scheduler.decide(now_ns, without_long=without_long and 2 * now_ns < len(jobs))
        ended += [one.number for one in (*decision.batch, *decision.expired)]
    assert sorted(ended) == [one.number for one in waiting]


def test_a_job_that_expires_in_a_batch_that_waits_disturbs_no_others() -> None:
    scheduler: Scheduler[Numbered] = Scheduler(Caps(max_queue_delay_ns=100))
    for number, (key, flow, deadline) in enumerate((("a", 1, 0), ("k", 2, 1), ("k", 2, 0), ("m", 2, 0))):
        scheduler.add(Numbered(number=number, key=key, flow=flow, deadline_ns=deadline))
    decision = scheduler.decide(5)
    assert decision.batch == []
    assert [one.number for one in decision.expired] == [1]
    assert sorted(one.number for _ in range(3) for one in scheduler.decide(200).batch) == [0, 2, 3]


def test_passing_a_long_job_with_many_priorities_costs_no_more_each_time() -> None:
    scheduler: Scheduler[Waiting] = Scheduler()
    scheduler.add(Waiting(priority=1, seconds=9.0))
    tracemalloc.start()
    try:
        held = 0
        for priority in range(2, 2002):
            scheduler.add(Waiting(priority=priority))
            assert scheduler.decide(0, is_idle=False, without_long=True).batch
            if priority == 1000:
                held = tracemalloc.get_traced_memory()[0]
        assert tracemalloc.get_traced_memory()[0] - held < 50_000
    finally:
        tracemalloc.stop()


def test_jobs_that_are_discarded_are_forgotten_behind_more_urgent_ones() -> None:
    scheduler: Scheduler[Waiting] = Scheduler()
    gone = []
    # Something urgent waits at each decision.
    scheduler.add(Waiting(priority=1))
    for _ in range(100):
        one = Held()
        scheduler.add(one)
        gone.append(weakref.ref(one))
        scheduler.add(Waiting(priority=1))
        assert [one.priority for one in scheduler.decide(0).batch] == [1]
        assert scheduler.discard(one)
        del one
    assert sum(one() is not None for one in gone) <= 2


def test_jobs_that_never_ran_are_forgotten_beside_others_of_their_key() -> None:
    scheduler: Scheduler[Waiting] = Scheduler(Caps(max_requests=2))
    gone = []
    for flow in range(1, 100):
        one = Held(key="x", flow=flow)
        # A key that never rests: others wait behind each batch.
        for _ in range(4 if flow == 1 else 2):
            scheduler.add(Waiting(key="x"))
        scheduler.add(one)
        gone.append(weakref.ref(one))
        assert scheduler.discard(one)
        del one
        assert len(scheduler.decide(0).batch) == 2
    assert len(scheduler) == 2
    assert sum(one() is not None for one in gone) <= 2


def test_while_long_jobs_wait_others_pass_them_in_their_order() -> None:
    """Also one behind a long job of its key, once that has run."""
    scheduler: Scheduler[Numbered] = Scheduler(CAPS)
    long_s = 2 * CAPS.max_seconds
    for number, (key, flow, seconds) in enumerate(
        [("x", 0, long_s), ("x", 0, 0.0), (None, 1, long_s), ("y", 0, 0.0), (None, 1, 0.0), ("y", 1, 0.0)]
    ):
        scheduler.add(Numbered(number=number, key=key, flow=flow, seconds=seconds))
    passed = [[one.number for one in scheduler.decide(1, is_idle=False, without_long=True).batch] for _ in range(3)]
    assert sorted(number for batch in passed for number in batch) == [3, 4, 5]
    assert passed[-1] == []
    assert len(scheduler) == 3
    ran = [[one.number for one in scheduler.decide(1).batch] for _ in range(3)]
    assert sorted(ran) == [[0], [1], [2]]
    assert ran.index([0]) < ran.index([1])


def seconds_of_a_look(count: int) -> float:
    """Shortest time of a decision beside a long job, while so many others wait that are all long."""
    scheduler: Scheduler[Waiting] = Scheduler()
    long = [Waiting(key="x", seconds=1.0) for _ in range(count)]
    for one in long:
        scheduler.add(one)
    spent = []
    for _ in range(100):
        began_s = time.perf_counter()
        decision = scheduler.decide(1, is_idle=False, without_long=True)
        spent.append(time.perf_counter() - began_s)
        assert not decision.batch
    # One that is discarded, or that has run, is counted no more.
    assert scheduler.discard(long[0])
    assert len(scheduler.decide(1).batch) == 1
    short = Waiting()
    scheduler.add(short)
    assert scheduler.decide(1, is_idle=False, without_long=True).batch == [short]
    return min(spent)


def test_many_long_jobs_cost_a_decision_nothing() -> None:
    assert seconds_of_a_look(2000) < 20 * seconds_of_a_look(5)
