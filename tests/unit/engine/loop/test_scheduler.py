"""The scheduler's promises: order, no loss, nothing late or discarded is run, no mixing of keys, no starvation."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tilewire.service.engine.loop.scheduler import DEFAULT_RANK, Caps, Scheduler, Waiting

JOBS = st.lists(
    st.tuples(
        st.integers(0, 3),  # priority
        st.sampled_from([None, "x", "y"]),  # key
        st.integers(0, 10),  # deadline
        st.integers(1, 5),  # rows
        st.booleans(),  # discarded while it waits
    ),
    max_size=30,
)
CAPS = Caps(max_requests=4, max_rows=8)


@dataclass(slots=True, eq=False)
class Numbered(Waiting):
    number: int = 0


def fill(jobs: list[tuple[int, str | None, int, int, bool]]) -> tuple[Scheduler[Numbered], list[Numbered]]:
    scheduler: Scheduler[Numbered] = Scheduler(CAPS)
    waiting = [
        Numbered(number=number, key=key, deadline_ns=deadline, priority=priority, rows=rows)
        for number, (priority, key, deadline, rows, _) in enumerate(jobs)
    ]
    for one in waiting:
        scheduler.add(one)
    for one, (*_, is_discarded) in zip(waiting, jobs, strict=True):
        if is_discarded:
            assert scheduler.discard(one)
            assert not scheduler.discard(one)
    return scheduler, waiting


@given(JOBS)
@settings(deadline=None)
def test_every_job_ends_once_as_it_should(jobs: list[tuple[int, str | None, int, int, bool]]) -> None:
    scheduler, waiting = fill(jobs)
    ran: list[int] = []
    expired: list[int] = []
    assert len(scheduler) == sum(not is_discarded for *_, is_discarded in jobs)
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
    discarded = [number for number, (*_, is_discarded) in enumerate(jobs) if is_discarded]
    assert sorted([*ran, *expired, *discarded]) == list(range(len(waiting)))


@given(JOBS)
@settings(deadline=None)
def test_the_most_urgent_and_oldest_leads_and_keys_keep_their_order(
    jobs: list[tuple[int, str | None, int, int, bool]],
) -> None:
    scheduler, waiting = fill([(*job[:2], 0, *job[3:]) for job in jobs])
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
