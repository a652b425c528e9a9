"""Decides which waiting jobs run next, and together. Pure: waiting jobs and the time in, a batch out.

Continuous: as soon as there is room on the device, the next batch begins with a job of the flow that is behind its
share. It is the most urgent job of that flow, the oldest among equals. All that share its key and fit the caps join it,
again by the shares of their flows. So nothing waits for a timer, unless `max_queue_delay_ns` is set. Jobs of a key
leave in the order in which their flow sent them. While one batch waits, others that need not are begun. No clock, no
torch, no I/O.

Source: start-time fair queueing (Goyal, Vin and Cheng, 1996), with the tags on flows instead of jobs.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest
from itertools import chain
from typing import Generic, TypeVar

import msgspec

WaitingT = TypeVar("WaitingT", bound="Waiting")

# `priority` 0 is the protocol's default and gives way to every requested priority.
DEFAULT_RANK = 2**31

# Cost of each job to its flow beside its time on the device, in seconds: the thread's own work
# (`benchmarks.bench_engine_loop`).
JOB_S = 10e-6

# Flows without jobs whose use of the device is remembered, of about 1,300 bytes each: they come by the addresses of clients.
MAX_IDLE_FLOWS = 1024


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits of one batch; a job that alone is over one runs alone.

    Attributes:
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


class Waiting(msgspec.Struct, eq=False):
    """A job in the queue, as far as the scheduler is concerned.

    Attributes:
        key: Batch key: jobs of equal keys may share a launch; None shares with nobody.
        arrived_ns: Time of arrival.
        deadline_ns: Latest start; 0 for none.
        priority: 1 is the most urgent of its flow; 0 is the default and the least.
        nbytes: Bytes that travel between host and device for it.
        seconds: Estimated time that it adds to a launch.
        weight: Share of its flow beside those of others.
        is_gone: Whether it was taken or discarded.
    """

    key: Hashable | None = None
    arrived_ns: int = 0
    deadline_ns: int = 0
    priority: int = 0
    rows: int = 1
    nbytes: int = 0
    seconds: float = 0.0
    flow: int = 0
    weight: int = 1
    is_gone: bool = False

    @property
    def cost_s(self) -> float:
        """Time that its flow is charged for it at first; see `Scheduler.settle`."""
        return (self.seconds + JOB_S) / self.weight


@dataclass(slots=True)
class Decision(Generic[WaitingT]):
    """Next action of the loop.

    Attributes:
        batch: To run together; empty when nothing waits, or when it is worth waiting for more.
        expired: Jobs whose deadline has passed; never to be run.
        wake_ns: When to decide again although nothing happened; 0 for never.
    """

    batch: list[WaitingT] = field(default_factory=list)
    expired: list[WaitingT] = field(default_factory=list)
    wake_ns: int = 0


class _Line(Generic[WaitingT]):
    """Jobs of one flow in the order in which they leave: the most urgent first, the oldest among equals."""

    __slots__ = ("_by_rank", "_ranks")

    def __init__(self) -> None:
        # Most lines have one rank, and a queue takes less time than a heap.
        self._by_rank: dict[int, deque[WaitingT]] = {}
        self._ranks: list[int] = []

    def append(self, waiting: WaitingT) -> None:
        """Adds a job behind all of its rank."""
        self._jobs_beside(waiting).append(waiting)

    def put_back(self, waiting: WaitingT) -> None:
        """Adds a job before all of its rank."""
        self._jobs_beside(waiting).appendleft(waiting)

    def front(self) -> deque[WaitingT] | None:
        """The jobs of the most urgent rank, not empty; None without any. A rank whose jobs were all taken is forgotten."""
        while self._ranks:
            jobs = self._by_rank[self._ranks[0]]
            if jobs:
                return jobs
            del self._by_rank[self._ranks.pop(0)]
        return None

    def all(self) -> Iterator[WaitingT]:
        """The jobs in order, and some that are gone."""
        return chain.from_iterable([self._by_rank[rank] for rank in self._ranks])

    def drop_first(self, waiting: WaitingT) -> bool:
        """Drops a job that is the first of its rank. Returns whether it is."""
        rank = waiting.priority or DEFAULT_RANK
        jobs = self._by_rank.get(rank)
        if not jobs or jobs[0] is not waiting:
            return False
        jobs.popleft()
        if not jobs and len(self._ranks) > 1:
            # Else ranks would pile up behind a job that others pass.
            self._ranks.remove(rank)
            del self._by_rank[rank]
        return True

    def waiting(self) -> _Line[WaitingT]:
        """Returns a line of those jobs that are not gone."""
        line = _Line[WaitingT]()
        for one in self.all():
            if not one.is_gone:
                line.append(one)
        return line

    def _jobs_beside(self, waiting: WaitingT) -> deque[WaitingT]:
        rank = waiting.priority or DEFAULT_RANK
        jobs = self._by_rank.get(rank)
        if jobs is None:
            insort(self._ranks, rank)
            jobs = self._by_rank[rank] = deque()
        return jobs


@dataclass(slots=True, eq=False)
class _Flow(Generic[WaitingT]):
    """Jobs of one sender.

    Attributes:
        used_s: Time that it was charged: the flow with the least is next.
        line: Its jobs, and some that are gone.
        num_waiting: Number of those that are still to run.
        num_gone: Number of those that have gone without being dropped, since all such were dropped last.
    """

    used_s: float
    line: _Line[WaitingT] = field(default_factory=_Line)
    num_waiting: int = 0
    num_gone: int = 0

    def take(self, waiting: WaitingT) -> None:
        """Takes note that a job is taken: mostly the first of its rank. Not while somebody walks the line."""
        if self.line.drop_first(waiting):
            waiting.is_gone = True
            self.num_waiting -= 1
        else:
            self.let_go(waiting)

    def let_go(self, waiting: WaitingT) -> None:
        """Takes note that a job is gone. A job holds tensors, so never more stay than wait."""
        waiting.is_gone = True
        self.num_waiting -= 1
        self.num_gone += 1
        if self.num_gone > self.num_waiting:
            self.line = self.line.waiting()
            self.num_gone = 0


class _Group(Generic[WaitingT]):
    """Jobs that may run together.

    Attributes:
        lines: The jobs by flow, and some that are gone.
        num_waiting: Number of those that are still to run.
    """

    __slots__ = ("lines", "num_waiting")

    def __init__(self) -> None:
        self.lines: defaultdict[int, _Line[WaitingT]] = defaultdict(_Line)
        self.num_waiting = 0


class Scheduler(Generic[WaitingT]):
    """The queue of one engine."""

    def __init__(self, caps: Caps | None = None) -> None:
        self._caps = caps or Caps()
        self._flows: dict[int, _Flow[WaitingT]] = {}
        # Flows by their time, a heap; an entry may be behind its flow's time. Each flow has one.
        self._turns: list[tuple[float, int]] = []
        # A key whose jobs have all left is forgotten: there may be one for each shape that anybody sends.
        self._by_key: dict[Hashable, _Group[WaitingT]] = {}
        # Time of the flow that was last chosen: a flow that was idle begins here, and saves nothing up.
        self._now_s = 0.0
        self._num_waiting = 0
        # Those of them that are long.
        self._num_long = 0

    def __len__(self) -> int:
        """Jobs that wait."""
        return self._num_waiting

    @property
    def num_flows(self) -> int:
        """Flows whose use of the device is remembered."""
        return len(self._flows)

    def add(self, waiting: WaitingT) -> None:
        """Queues a job behind all of its flow and priority."""
        flow = self._flow_of(waiting.flow)
        if not flow.num_waiting and flow.used_s < self._now_s:
            flow.used_s = self._now_s
        flow.line.append(waiting)
        if waiting.key is not None:
            group = self._by_key.get(waiting.key)
            if group is None:
                group = self._by_key[waiting.key] = _Group()
            group.lines[waiting.flow].append(waiting)
            group.num_waiting += 1
        flow.num_waiting += 1
        self._num_waiting += 1
        self._num_long += self.is_long(waiting.seconds)

    def discard(self, waiting: WaitingT) -> bool:
        """Forgets a queued job. Returns whether it was still to run."""
        if waiting.is_gone:
            return False
        self._remove(waiting)
        return True

    def is_long(self, seconds: float) -> bool:
        """Whether a job of this estimated duration runs alone, and keeps the others waiting for longer than a batch may."""
        return seconds > self._caps.max_seconds

    def decide(self, now_ns: int, *, is_idle: bool = True, without_long: bool = False) -> Decision[WaitingT]:
        """Takes the next batch out of the queue, and what expired before it.

        Args:
            now_ns: The time, on the clock of `arrived_ns` and the deadlines.
            is_idle: Nothing runs on the device: only then is it worth waiting for a batch to grow.
            without_long: Long jobs wait on, and others pass them.
        """
        decision: Decision[WaitingT] = Decision()
        head = self._head(now_ns, decision)
        assert head is not None or not self._num_waiting, "This is a bug: the queue lost a job."
        # Keys whose batches wait for more.
        growing: set[Hashable] = set()
        others: Iterator[WaitingT] | None = None
        if without_long and head is not None and self.is_long(head.seconds):
            if self._num_long == self._num_waiting:
                return decision
            others = self._heads_beside(growing, now_ns, without_long=True)
            head = next(others, None)
        while head is not None:
            batch, is_full = self._gather(head, now_ns, decision)
            ready_ns = 0 if not is_idle or is_full else self._ready_ns(batch)
            # A long job may be before others of its key.
            if now_ns >= ready_ns and not (without_long and self.is_long(batch[0].seconds)):
                self._take(head, batch)
                decision.batch, decision.wake_ns = batch, 0
                return decision
            for waiting in reversed(batch):
                self._by_key[head.key].lines[waiting.flow].put_back(waiting)
            decision.wake_ns = min(decision.wake_ns or ready_ns, ready_ns)
            growing.add(head.key)
            others = others or self._heads_beside(growing, now_ns, without_long=without_long)
            head = next(others, None)
        return decision

    def _ready_ns(self, batch: Sequence[WaitingT]) -> int:
        """When a batch that could grow begins at the latest: no job waits longer for that than half the way to its deadline."""
        delay_ns = self._caps.max_queue_delay_ns
        if not delay_ns:
            return 0
        latest_ns = (one.arrived_ns + delay_ns for one in batch)
        halfway_ns = ((one.arrived_ns + one.deadline_ns) // 2 for one in batch if one.deadline_ns)
        return min(chain(latest_ns, halfway_ns))

    def _take(self, head: WaitingT, batch: Sequence[WaitingT]) -> None:
        """Takes a batch out of the queue, and charges its flows."""
        self._now_s = self._flows[head.flow].used_s
        for waiting in batch:
            flow = self._flows[waiting.flow]
            flow.take(waiting)
            flow.used_s += waiting.cost_s
            self._num_long -= self.is_long(waiting.seconds)
        self._num_waiting -= len(batch)
        self._leave(head.key, len(batch))

    def settle(self, batch: Sequence[WaitingT], seconds: float) -> None:
        """Charges the flows of a batch for what it took beyond their estimates, which leave much out.

        Args:
            batch: Jobs that `decide` gave.
            seconds: Time of the device.
        """
        if self._flows.keys() == {one.flow for one in batch}:
            # There is nobody else, and whoever comes begins where these are.
            return
        estimated_s = sum(one.seconds for one in batch)
        beyond_s = seconds - estimated_s
        if beyond_s <= 0:
            return
        for one in batch:
            part = one.seconds / estimated_s if estimated_s else 1 / len(batch)
            self._flow_of(one.flow).used_s += part * beyond_s / one.weight

    def _flow_of(self, number: int) -> _Flow[WaitingT]:
        """The flow of this number; one that was not known begins where the last one that was chosen is."""
        flow = self._flows.get(number)
        if flow is None:
            # Each waiting flow has a job, so more than these are idle.
            if len(self._flows) - self._num_waiting > MAX_IDLE_FLOWS:
                self._forget_idle()
            flow = self._flows[number] = _Flow(self._now_s)
            heappush(self._turns, (self._now_s, number))
        return flow

    def _forget_idle(self) -> None:
        """Forgets half of the flows without jobs: those that used least."""
        idle = [(flow.used_s, number) for number, flow in self._flows.items() if not flow.num_waiting]
        kept = {number for _used_s, number in nlargest(MAX_IDLE_FLOWS // 2, idle)}
        self._flows = {number: flow for number, flow in self._flows.items() if flow.num_waiting or number in kept}
        self._turns = [(flow.used_s, number) for number, flow in self._flows.items()]
        heapify(self._turns)

    def _head(self, now_ns: int, decision: Decision[WaitingT]) -> WaitingT | None:
        """The first job of the flow whose turn it is; flows without jobs are forgotten when it would be theirs."""
        turns = self._turns
        while turns:
            used_s, number = turns[0]
            flow = self._flows[number]
            if used_s < flow.used_s:
                heapreplace(turns, (flow.used_s, number))
                continue
            jobs = self._next(flow.line, now_ns, decision)
            if jobs is not None:
                return jobs[0]
            heappop(turns)
            del self._flows[number]
        return None

    def _heads_beside(self, growing: Collection[Hashable], now_ns: int, *, without_long: bool) -> Iterator[WaitingT]:
        """The jobs that need not wait for a batch of these keys, which may become more meanwhile, by the turns of the flows."""
        for _used_s, flow in sorted((flow.used_s, number) for number, flow in self._flows.items() if flow.num_waiting):
            for waiting in self._flows[flow].line.all():
                is_late = 0 < waiting.deadline_ns < now_ns
                if waiting.is_gone or is_late or waiting.key in growing:
                    continue
                if not (without_long and self.is_long(waiting.seconds)):
                    yield waiting

    def _gather(self, head: WaitingT, now_ns: int, decision: Decision[WaitingT]) -> tuple[list[WaitingT], bool]:
        """The head and all that may run with it, by turns of their flows, out of their key's queue.

        Returns:
            The jobs, and whether a cap, not the queue, ended them.
        """
        if head.key is None:
            return [head], True
        by_flow = self._by_key[head.key].lines
        batch: list[WaitingT] = []
        caps, rows, nbytes, seconds = self._caps, 0, 0, 0.0
        turn, others = (self._flows[head.flow].used_s, head.flow), []
        if len(by_flow) > 1:
            for flow in [flow for flow in by_flow if flow not in self._flows]:
                del by_flow[flow]
            others = [(self._flows[flow].used_s, flow) for flow in by_flow if flow != head.flow]
            heapify(others)
        while True:
            used_s, flow = turn
            jobs = self._next(by_flow[flow], now_ns, decision)
            if jobs is None:
                del by_flow[flow]
                if not others:
                    return batch, len(batch) >= caps.max_requests
                turn = heappop(others)
                continue
            waiting = jobs[0]
            rows += waiting.rows
            nbytes += waiting.nbytes
            seconds += waiting.seconds
            if batch and (
                len(batch) >= caps.max_requests
                or rows > caps.max_rows
                or nbytes > caps.max_bytes
                or seconds > caps.max_seconds
            ):
                return batch, True
            batch.append(jobs.popleft())
            if others:
                turn = heappushpop(others, (used_s + waiting.cost_s, flow))

    def _next(self, line: _Line[WaitingT], now_ns: int, decision: Decision[WaitingT]) -> deque[WaitingT] | None:
        """The jobs of a line's most urgent rank. The first is still to run: what is gone or late before it is dropped."""
        while (jobs := line.front()) is not None:
            waiting = jobs[0]
            if waiting.is_gone:
                jobs.popleft()
            elif 0 < waiting.deadline_ns < now_ns:
                jobs.popleft()
                self._remove(waiting)
                decision.expired.append(waiting)
            else:
                return jobs
        return None

    def _remove(self, waiting: WaitingT) -> None:
        self._num_waiting -= 1
        self._num_long -= self.is_long(waiting.seconds)
        self._flows[waiting.flow].let_go(waiting)
        self._leave(waiting.key, 1)

    def _leave(self, key: Hashable | None, count: int) -> None:
        if key is None:
            return
        group = self._by_key[key]
        group.num_waiting -= count
        if not group.num_waiting:
            del self._by_key[key]
