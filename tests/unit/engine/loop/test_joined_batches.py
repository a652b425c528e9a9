"""The scheduler's batches: caps, order within a key, no mixing, no starvation, nothing lost. Properties over random traffic."""

from __future__ import annotations

from hypothesis import given, settings
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


def test_a_batch_that_grows_starts_half_the_way_to_the_first_deadline_in_it() -> None:
    scheduler: Scheduler = Scheduler(Caps(max_queue_delay_ns=1000))
    first = Waiting(key="a", arrived_ns=100)
    hurried = Waiting(key="a", arrived_ns=200, deadline_ns=600)
    scheduler.add(first)
    assert scheduler.decide(150).wake_ns == 1100
    scheduler.add(hurried)
    decision = scheduler.decide(250)
    assert not decision.batch
    assert decision.wake_ns == 400
    assert scheduler.decide(400).batch == [first, hurried]


def test_who_need_not_wait_does_not_wait_for_a_batch_that_grows() -> None:
    scheduler: Scheduler = Scheduler(Caps(max_requests=2, max_queue_delay_ns=1000))
    growing = Waiting(key="a", arrived_ns=100)
    scheduler.add(growing)
    assert not scheduler.decide(100).batch
    alone = Waiting(arrived_ns=200)
    full = [Waiting(key="b", arrived_ns=210) for _ in range(2)]
    for one in (alone, Waiting(key="c", arrived_ns=205), *full):
        scheduler.add(one)
    assert scheduler.decide(220).batch == [alone]
    assert scheduler.decide(220).batch == full
    decision = scheduler.decide(220)
    assert not decision.batch
    # Of two batches that grow the first is ready first.
    assert decision.wake_ns == 1100
    assert scheduler.decide(1100).batch == [growing]
    assert scheduler.decide(1100).wake_ns == 1205


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b"]),
            st.integers(1, 300),  # arrival
            st.sampled_from([0, 0, 2, 40, 90, 400]),  # time to the deadline; 0 for none
            st.integers(0, 2),  # flow
            st.integers(0, 2),  # priority
        ),
        max_size=30,
    )
)
@settings(deadline=None)
def test_with_a_delay_every_job_ends_once_and_at_its_time(jobs: list[tuple[str | None, int, int, int, int]]) -> None:
    """By events alone: the queue is asked when a job comes, and when it said so."""
    scheduler: Scheduler = Scheduler(Caps(max_requests=3, max_queue_delay_ns=50))
    waiting = [
        Waiting(key=key, arrived_ns=arrived, deadline_ns=left and arrived + left, flow=flow, priority=priority)
        for key, arrived, left, flow, priority in sorted(jobs, key=lambda job: job[1])
    ]
    ended: list[tuple[Waiting, int]] = []
    coming, now_ns, wake_ns = list(waiting), 0, 0
    while coming or len(scheduler):
        now_ns = min([*([wake_ns] if wake_ns else []), *(one.arrived_ns for one in coming[:1])])
        while coming and coming[0].arrived_ns <= now_ns:
            scheduler.add(coming.pop(0))
        while True:
            decision = scheduler.decide(now_ns)
            assert not decision.expired
            ended += [(one, now_ns) for one in decision.batch]
            if not decision.batch:
                break
        wake_ns = decision.wake_ns
        assert bool(wake_ns) == bool(len(scheduler))
    assert sorted(map(id, waiting)) == sorted(id(one) for one, _ in ended)
    for one, at_ns in ended:
        assert at_ns <= one.arrived_ns + (50 if one.key else 0)
        assert not one.deadline_ns or at_ns <= max(one.arrived_ns, (one.arrived_ns + one.deadline_ns) // 2)


def test_the_queue_forgets_keys_that_have_no_jobs() -> None:
    scheduler: Scheduler = Scheduler()
    keeps_busy = Waiting(key="busy")
    for number in range(100):
        scheduler.add(Waiting(key=number, priority=1))
        scheduler.decide(0)
    scheduler.add(keeps_busy)
    assert len(scheduler._by_key) == 1
