"""Counters, histograms and gauges of one process: plain dictionaries, sent as differences to the supervisor.

An increment is a dictionary update. `MetricSet.flush` sends what changed since the last flush; `exposition.Totals` adds it up
over all processes. Owns no metric and no socket. One thread each.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

Labels = tuple[str, ...]

# From 20 µs in steps of 1.6 to over a minute. A launch on a GPU and a large body on a slow line both fall inside.
# Rounded, because the bounds are labels that people write into queries.
SECONDS_BUCKETS = tuple(float(f"{20e-6 * 1.6**step:.4g}") for step in range(33))


# Begin of the label of a kept program; no op's begins so.
OF_PROGRAM = "program:"

# Values of a gauge that are compared with the next ones.
MAX_REMEMBERED = 4096

# Last failures that are kept of each key; what is behind them is in the log.
MAX_FAILURES = 50
# Keys whose failures are kept.
MAX_FAILING_KEYS = 1000


class MetricSpec(msgspec.Struct, frozen=True, array_like=True):
    """Definition of a metric.

    Attributes:
        name: Name in the exposition; that of a counter ends with `_total`.
        kind: Counters and histograms are added up over all processes, also dead ones; gauges over live ones.
        bounds: Upper bounds of a histogram's buckets, without infinity.
        merge: Rule that merges gauges of several processes.
        is_shown: Whether `/metrics` has it; else see `exposition.HiddenSums`.
    """

    name: str
    text: str
    labels: Labels
    kind: Literal["counter", "histogram", "gauge"]
    bounds: tuple[float, ...] = ()
    merge: Literal["sum", "max"] = "sum"
    is_shown: bool = True


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Change of one series since the last flush.

    Attributes:
        values: Increment of a counter; value of a gauge; increments of a histogram's buckets, then of its sum.
    """

    name: str
    labels: Labels
    values: tuple[int | float, ...]


class Exemplar(msgspec.Struct, frozen=True, array_like=True):
    """Last observation that fell into a bucket and has labels of its own.

    Attributes:
        unix_s: Time of the observation.
        shown: Labels that lead to its cause.
    """

    name: str
    labels: Labels
    bucket: int
    value: float
    unix_s: float
    shown: Mapping[str, str]


class Failure(msgspec.Struct, frozen=True):
    """A request that was refused or failed.

    Attributes:
        time: Unix time of its end, in seconds.
        route: Pattern of its path; no names of tensors.
        op: Name of the op, or None.
        reason: Code of the error.
        request_id: Id that leads to the log.
        key: Name of its API key, or None.
    """

    time: float
    method: str
    route: str
    op: str | None
    status: int
    reason: str
    request_id: str
    key: str | None


class LastFailures:
    """The last failures of each key, and those of requests without one: nobody pushes out what others see."""

    def __init__(self) -> None:
        self._by_key: dict[str | None, deque[Failure]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def add(self, failure: Failure) -> None:
        """Adds a failure; those of the key that has had none for longest may go."""
        kept = self._by_key.pop(failure.key, None) or deque(maxlen=MAX_FAILURES)
        kept.append(failure)
        self._by_key[failure.key] = kept
        if len(self._by_key) > MAX_FAILING_KEYS:
            del self._by_key[next(iter(self._by_key))]

    def take(self) -> list[Failure]:
        """Returns all, and keeps none."""
        taken, self._by_key = self._by_key, {}
        return [failure for kept in taken.values() for failure in kept]

    def newest(self, name: str | None) -> list[Failure]:
        """Returns what may be seen, the last one first.

        Args:
            name: Name of the key whose failures are wanted; None for the last of all keys, and those without one.
        """
        if name is not None:
            return sorted(self._by_key.get(name, ()), key=_time_of, reverse=True)
        named = [failure for key, kept in self._by_key.items() if key is not None for failure in kept]
        found = [*heapq.nlargest(MAX_FAILURES, named, _time_of), *self._by_key.get(None, ())]
        return sorted(found, key=_time_of, reverse=True)


def _time_of(failure: Failure) -> float:
    return failure.time


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    """Changes since the last flush, with the definitions of metrics that are new."""

    specs: list[MetricSpec]
    samples: list[Sample]
    exemplars: list[Exemplar] = []
    failures: list[Failure] = []


class Sink(Protocol):
    """Interface that takes figures."""

    @property
    def is_congested(self) -> bool:
        """Whether figures should wait: those that were sent before have not left."""
        ...

    def send(self, figures: Figures) -> None:
        """Sends figures; they are added up exactly once."""
        ...


class Counter:
    """A counter; made by `MetricSet.counter`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: defaultdict[Labels, float] = defaultdict(int)

    def prepare(self, every: Iterable[Labels]) -> None:
        """Begins the series of these label values at 0, so that a rate sees the first increment."""
        for labels in every:
            self._pending[labels] += 0

    def inc(self, labels: Labels, amount: float = 1) -> None:
        """Adds to the series of these label values."""
        self._pending[labels] += amount

    def take(self) -> list[Sample]:
        """Returns what changed since the last call."""
        if not self._pending:
            return []
        pending, self._pending = self._pending, defaultdict(int)
        return [Sample(self._name, labels, (amount,)) for labels, amount in pending.items()]


class Histogram:
    """A histogram; made by `MetricSet.histogram`."""

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._bounds = list(bounds)
        self._pending: dict[Labels, list[float]] = {}
        self._exemplars: dict[tuple[Labels, int], tuple[float, float, Mapping[str, str]]] = {}

    def prepare(self, every: Iterable[Labels]) -> None:
        """Begins the series of these label values with nothing in them."""
        for labels in every:
            self._series(labels)

    def observe(self, labels: Labels, value: float, times: int = 1) -> int:
        """Adds an observation, or several of the same value; one on a bound belongs to that bound's bucket.

        Returns:
            Index of the bucket.
        """
        pending = self._pending.get(labels) or self._series(labels)
        bucket = bisect_left(self._bounds, value)
        pending[bucket] += times
        pending[-1] += value * times
        return bucket

    def observe_all(self, labels: Labels, values: Sequence[float]) -> list[int]:
        """As `observe` for each value; returns their buckets."""
        pending = self._pending.get(labels) or self._series(labels)
        bounds = self._bounds
        buckets = [bisect_left(bounds, value) for value in values]
        for bucket in buckets:
            pending[bucket] += 1
        pending[-1] += sum(values)
        return buckets

    def show(self, labels: Labels, bucket: int, value: float, unix_s: float, shown: Mapping[str, str]) -> None:
        """Makes an observation the exemplar of its bucket."""
        self._exemplars[labels, bucket] = (value, unix_s, shown)

    def take(self) -> list[Sample]:
        """Returns what changed since the last call."""
        pending, self._pending = self._pending, {}
        return [Sample(self._name, labels, tuple(values)) for labels, values in pending.items()]

    def take_exemplars(self) -> list[Exemplar]:
        """Returns the exemplars since the last call."""
        exemplars, self._exemplars = self._exemplars, {}
        return [Exemplar(self._name, labels, bucket, *seen) for (labels, bucket), seen in exemplars.items()]

    def _series(self, labels: Labels) -> list[float]:
        # A count for each bucket, one for infinity, and the sum.
        return self._pending.setdefault(labels, [0] * (len(self._bounds) + 2))


class Gauge:
    """A gauge; made by `MetricSet.gauge`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values: dict[Labels, float] = {}
        self._pending: dict[Labels, float] = {}

    def set(self, labels: Labels, value: float) -> None:
        """Sets the series of these label values."""
        if self._values.get(labels) != value:
            self._values[labels] = self._pending[labels] = value

    def take(self) -> list[Sample]:
        """Returns what changed since the last call."""
        pending, self._pending = self._pending, {}
        if len(self._values) > MAX_REMEMBERED:
            # One that is set again is sent again.
            self._values.clear()
        return [Sample(self._name, labels, (value,)) for labels, value in pending.items()]


MetricT = TypeVar("MetricT", Counter, Histogram, Gauge)


class MetricSet:
    """Metrics of one thread of a process."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._new: list[MetricSpec] = []
        self._metrics: list[Counter | Histogram | Gauge] = []
        self._failures = LastFailures()

    def counter(self, name: str, text: str, labels: Labels, *, is_shown: bool = True) -> Counter:
        """Defines a counter; see `MetricSpec`."""
        return self._define(MetricSpec(name, text, labels, "counter", is_shown=is_shown), Counter(name))

    def histogram(self, name: str, text: str, labels: Labels, bounds: Sequence[float] = SECONDS_BUCKETS) -> Histogram:
        """Defines a histogram, of seconds unless `bounds` are others; see `MetricSpec`."""
        return self._define(MetricSpec(name, text, labels, "histogram", tuple(bounds)), Histogram(name, bounds))

    def gauge(
        self,
        name: str,
        text: str,
        labels: Labels = (),
        *,
        merge: Literal["sum", "max"] = "sum",
        is_shown: bool = True,
    ) -> Gauge:
        """Defines a gauge; see `MetricSpec`."""
        return self._define(MetricSpec(name, text, labels, "gauge", merge=merge, is_shown=is_shown), Gauge(name))

    def _define(self, spec: MetricSpec, metric: MetricT) -> MetricT:
        self._new.append(spec)
        self._metrics.append(metric)
        return metric

    def note(self, failure: Failure) -> None:
        """Notes a failure for the list of the last ones."""
        self._failures.add(failure)

    def flush(self) -> None:
        """Sends what changed since the last flush, unless nothing did."""
        if self._sink.is_congested:
            return
        samples: list[Sample] = []
        exemplars: list[Exemplar] = []
        for metric in self._metrics:
            samples += metric.take()
            if isinstance(metric, Histogram):
                exemplars += metric.take_exemplars()
        if samples or self._new or self._failures:
            specs, self._new = self._new, []
            self._sink.send(Figures(specs, samples, exemplars, self._failures.take()))
