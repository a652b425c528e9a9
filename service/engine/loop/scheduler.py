"""Decides which waiting jobs run next, and together. Pure: waiting jobs and the time in, a batch out.

Continuous: whenever there is room on the device, the next batch is the most urgent job, the oldest among equals, and with it
all that share its key and fit the caps, in their order. So nothing waits for a timer (unless `max_queue_delay_ns` says so),
jobs of a key leave in the order in which they came, and a rare key is served as soon as its job is the oldest, however many
jobs of another key arrive meanwhile. No clock, no torch, no I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

WaitingT = TypeVar("WaitingT", bound="Waiting")

# `priority` 0 is the protocol's default and gives way to every priority that was asked for.
DEFAULT_RANK = 2**31


@dataclass(frozen=True, slots=True)
class Caps:
    """What one batch may hold; a job that alone is over a cap runs alone.

    Attributes:
        max_requests: Jobs.
        max_rows: Rows of their results.
        max_bytes: Bytes that travel between host and device for them.
        max_seconds: Time that they are predicted to take: what the next job would wait.
        max_queue_delay_ns: Time for which a batch that could still grow waits while the device is idle.
    """

    max_requests: int = 64
    max_rows: int = 8192
    max_bytes: int = 64 * 2**20
    max_seconds: float = 0.005
    max_queue_delay_ns: int = 0


@dataclass(slots=True, eq=False)
class Waiting:
    """A job in the queue, as far as the scheduler is concerned.

    Attributes:
        key: Batch key: jobs of equal keys may share a launch; None shares with nobody.
        arrived_ns: Time of arrival.
        deadline_ns: Latest start; 0 for none.
        priority: 1 is the most urgent; 0 is the default and the least.
        rows: Number of rows of its result.
        nbytes: Bytes that travel between host and device for it.
        seconds: Estimated time that it adds to a launch.
        is_gone: Whether it was taken or discarded.
    """

    key: Hashable | None = None
    arrived_ns: int = 0
    deadline_ns: int = 0
    priority: int = 0
    rows: int = 1
    nbytes: int = 0
    seconds: float = 0.0
    is_gone: bool = False

    def is_late(self, now_ns: int) -> bool:
        """Whether its deadline has passed."""
        return 0 < self.deadline_ns < now_ns


@dataclass(slots=True)
class Decision(Generic[WaitingT]):
    """What to do now.

    Attributes:
        batch: To run together; empty when nothing waits, or when it is worth waiting for more.
        expired: Whose deadline passed; never to be run.
        wake_ns: When to decide again although nothing happened; 0 for never.
    """

    batch: list[WaitingT] = field(default_factory=list)
    expired: list[WaitingT] = field(default_factory=list)
    wake_ns: int = 0


Entry = tuple[int, int, WaitingT]


class Scheduler(Generic[WaitingT]):
    """The queue of one engine.

    Args:
        caps: Limits of a batch.
    """

    def __init__(self, caps: Caps | None = None) -> None:
        self._caps = caps or Caps()
        self._all: list[Entry[WaitingT]] = []
        self._by_key: dict[Hashable, list[Entry[WaitingT]]] = {}
        self._num_added = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        """Jobs that wait."""
        return self._num_waiting

    def add(self, waiting: WaitingT) -> None:
        """Queues a job behind all of its priority."""
        entry = (waiting.priority or DEFAULT_RANK, self._num_added, waiting)
        heapq.heappush(self._all, entry)
        if waiting.key is not None:
            heapq.heappush(self._by_key.setdefault(waiting.key, []), entry)
        self._num_added += 1
        self._num_waiting += 1

    def discard(self, waiting: WaitingT) -> bool:
        """Forgets a queued job. Returns whether it was still to run."""
        if waiting.is_gone:
            return False
        self._remove(waiting)
        return True

    def decide(self, now_ns: int, *, is_idle: bool = True) -> Decision[WaitingT]:
        """Takes the next batch out of the queue, and what expired before it.

        Args:
            now_ns: The time, on the clock of `arrived_ns` and the deadlines.
            is_idle: Nothing runs on the device: only then is it worth waiting for a batch to grow.
        """
        decision: Decision[WaitingT] = Decision()
        head = self._first(self._all, now_ns, decision)
        if head is None:
            assert not self._num_waiting, "This is a bug: the queue lost a job."
            self._by_key.clear()
            return decision
        entries, is_full = self._gather(head, now_ns, decision)
        batch = [entry[2] for entry in entries]
        ready_ns = head.arrived_ns + self._caps.max_queue_delay_ns
        if is_idle and not is_full and head.key is not None and now_ns < ready_ns:
            decision.wake_ns = min([ready_ns, *(one.deadline_ns for one in batch if one.deadline_ns)])
            for entry in entries:
                heapq.heappush(self._by_key[head.key], entry)
            return decision
        for waiting in batch:
            self._remove(waiting)
        if head.key is not None and self._first(self._by_key[head.key], now_ns, decision) is None:
            del self._by_key[head.key]
        decision.batch = batch
        return decision

    def _gather(self, head: WaitingT, now_ns: int, decision: Decision[WaitingT]) -> tuple[list[Entry[WaitingT]], bool]:
        """The head and all that may run with it, in order, out of their key's queue; whether a cap, not the queue, ended it."""
        if head.key is None:
            return [self._all[0]], True
        entries = self._by_key[head.key]
        batch: list[Entry[WaitingT]] = []
        total = _Total(self._caps)
        is_full = False
        while (waiting := self._first(entries, now_ns, decision)) is not None:
            if batch and not total.has_room_for(waiting):
                is_full = True
                break
            total.add(waiting)
            batch.append(heapq.heappop(entries))
        return batch, is_full or total.requests >= self._caps.max_requests

    def _first(self, entries: list[Entry[WaitingT]], now_ns: int, decision: Decision[WaitingT]) -> WaitingT | None:
        """The first entry that is still to run; what is gone or late before it is dropped."""
        while entries:
            waiting = entries[0][2]
            if waiting.is_gone:
                heapq.heappop(entries)
            elif waiting.is_late(now_ns):
                heapq.heappop(entries)
                self._remove(waiting)
                decision.expired.append(waiting)
            else:
                return waiting
        return None

    def _remove(self, waiting: WaitingT) -> None:
        waiting.is_gone = True
        self._num_waiting -= 1


class _Total:
    """What a growing batch holds."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self.requests = 0
        self._rows = 0
        self._nbytes = 0
        self._seconds = 0.0

    def has_room_for(self, waiting: Waiting) -> bool:
        return (
            self.requests < self._caps.max_requests
            and self._rows + waiting.rows <= self._caps.max_rows
            and self._nbytes + waiting.nbytes <= self._caps.max_bytes
            and self._seconds + waiting.seconds <= self._caps.max_seconds
        )

    def add(self, waiting: Waiting) -> None:
        self.requests += 1
        self._rows += waiting.rows
        self._nbytes += waiting.nbytes
        self._seconds += waiting.seconds
