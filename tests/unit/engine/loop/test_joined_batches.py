"""The scheduler's batches: caps, order within a key, no mixing, no starvation, nothing lost. Properties over random traffic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilewire.service.engine.loop.scheduler import Caps, Scheduler, Waiting

jobs = st.lists(
    st.builds(
        Waiting,
        key=st.sampled_from([None, "a", "b", "c"]),
        arrived_ns=st.just(0),
        deadline_ns=st.sampled_from([0, 0, 0, 50, 150]),
        priority=st.sampled_from([0, 0, 1, 2]),
        rows=st.integers(1, 40),
        nbytes=st.integers(1, 400),
        seconds=st.floats(0, 0.01),
    ),
    max_size=40,
)
caps = st.builds(
    Caps,
    max_requests=st.integers(1, 8),
    max_rows=st.integers(1, 100),
    max_bytes=st.integers(1, 1000),
    max_seconds=st.floats(0.0001, 0.05),
)


def drain(scheduler: Scheduler, now_ns: int) -> tuple[list[list[Waiting]], list[Waiting]]:
    batches, expired = [], []
    while len(scheduler):
        decision = scheduler.decide(now_ns)
        expired += decision.expired
        if decision.batch:
            batches.append(decision.batch)
    return batches, expired


@given(jobs, caps)
def test_every_job_runs_once_or_expires_and_batches_keep_the_caps(waiting: list[Waiting], caps: Caps) -> None:
    scheduler: Scheduler = Scheduler(caps)
    for one in waiting:
        scheduler.add(one)
    batches, expired = drain(scheduler, now_ns=100)
    ran = [one for batch in batches for one in batch]
    assert sorted(map(id, ran + expired)) == sorted(map(id, waiting))
    assert all(0 < one.deadline_ns < 100 for one in expired)
    assert not any(0 < one.deadline_ns < 100 for one in ran)
    for batch in batches:
        assert len({one.key for one in batch}) == 1
        assert len(batch) == 1 or batch[0].key is not None
        if len(batch) > 1:
            assert len(batch) <= caps.max_requests
            assert sum(one.rows for one in batch) <= caps.max_rows
            assert sum(one.nbytes for one in batch) <= caps.max_bytes
            assert sum(one.seconds for one in batch) <= caps.max_seconds


@given(jobs, caps)
def test_jobs_of_a_key_and_a_priority_leave_in_the_order_in_which_they_came(waiting: list[Waiting], caps: Caps) -> None:
    scheduler: Scheduler = Scheduler(caps)
    for one in waiting:
        scheduler.add(one)
    batches, _ = drain(scheduler, now_ns=0)
    places = {id(one): place for place, one in enumerate(waiting)}
    for key in ("a", "b", "c"):
        for priority in (0, 1, 2):
            order = [
                places[id(one)] for batch in batches for one in batch if one.key == key and one.priority == priority
            ]
            assert order == sorted(order)


@given(st.integers(1, 30), st.integers(1, 30))
def test_a_rare_key_is_next_once_its_job_is_the_oldest(before: int, after: int) -> None:
    scheduler: Scheduler = Scheduler(Caps(max_requests=4))
    for _ in range(before):
        scheduler.add(Waiting(key="busy"))
    rare = Waiting(key="rare")
    scheduler.add(rare)
    for _ in range(after):
        scheduler.add(Waiting(key="busy"))
    num_before_rare = 0
    while rare not in (batch := scheduler.decide(0).batch):
        num_before_rare += 1
        assert batch
    assert num_before_rare <= -(-before // 4)


@given(jobs)
def test_discarded_jobs_never_run(waiting: list[Waiting]) -> None:
    scheduler: Scheduler = Scheduler()
    for one in waiting:
        scheduler.add(one)
    gone = waiting[::2]
    for one in gone:
        assert scheduler.discard(one)
        assert not scheduler.discard(one)
    batches, expired = drain(scheduler, now_ns=100)
    assert not {id(one) for batch in batches for one in batch} & set(map(id, gone))
    assert not set(map(id, expired)) & set(map(id, gone))


def test_without_a_delay_nothing_waits() -> None:
    scheduler: Scheduler = Scheduler()
    one = Waiting(key="a", arrived_ns=100)
    scheduler.add(one)
    assert scheduler.decide(100).batch == [one]


def test_with_a_delay_an_idle_device_waits_for_a_batch_to_grow() -> None:
    scheduler: Scheduler = Scheduler(Caps(max_requests=2, max_queue_delay_ns=1000))
    first = Waiting(key="a", arrived_ns=100)
    scheduler.add(first)
    decision = scheduler.decide(200)
    assert decision.batch == []
    assert decision.wake_ns == 1100
    assert scheduler.decide(200, is_idle=False).batch == [first]

    second, third = Waiting(key="a", arrived_ns=300), Waiting(key="a", arrived_ns=310)
    scheduler.add(second)
    assert scheduler.decide(320).batch == []
    scheduler.add(third)
    assert scheduler.decide(330).batch == [second, third]


def test_a_delay_never_outlasts_a_deadline() -> None:
    scheduler: Scheduler = Scheduler(Caps(max_queue_delay_ns=1000))
    scheduler.add(Waiting(key="a", arrived_ns=100, deadline_ns=500))
    assert scheduler.decide(200).wake_ns == 500
    assert len(scheduler.decide(500).batch) + len(scheduler.decide(501).expired) == 1


def test_the_queue_forgets_keys_that_have_no_jobs() -> None:
    scheduler: Scheduler = Scheduler()
    keeps_busy = Waiting(key="busy")
    for number in range(100):
        scheduler.add(Waiting(key=number, priority=1))
        scheduler.decide(0)
    scheduler.add(keeps_busy)
    assert len(scheduler._by_key) == 1
