"""Counters and histograms that are cheap on a hot path: plain dictionaries, handed to prometheus_client now and then.

In multiprocess mode prometheus_client takes a lock, asks for the process id and writes a mapped file for every
increment, several for each request. Here an increment is a dictionary update, and `flush` writes the sums. Owns no
metric; one thread each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

Labels = tuple[str, ...]

# From 20 µs in steps of 1.6 to over a minute: a launch on a GPU and a large body on a slow line both fall inside.
# Rounded, because the bounds are labels that people write into queries.
SECONDS_BUCKETS = tuple(float(f"{20e-6 * 1.6**step:.4g}") for step in range(33))


class BufferedCounter:
    """A counter whose increments are kept until `flush`.

    Args:
        name: Of the metric.
        text: Its help.
        labels: Names of its labels.
        registry: Where it is registered.
    """

    def __init__(self, name: str, text: str, labels: Labels, registry: CollectorRegistry) -> None:
        self._counter = Counter(name, text, labels, registry=registry)
        self._pending: defaultdict[Labels, float] = defaultdict(int)

    def inc(self, labels: Labels, amount: float = 1) -> None:
        """Adds to the counter of these label values."""
        self._pending[labels] += amount

    def flush(self) -> None:
        """Hands the increments over."""
        for labels, amount in self._pending.items():
            self._counter.labels(*labels).inc(amount)
        self._pending.clear()


class BufferedHistogram:
    """A histogram whose observations are kept until `flush`.

    Args:
        name: Of the metric.
        text: Its help.
        labels: Names of its labels.
        bounds: Its buckets, without infinity.
        registry: Where it is registered.
    """

    def __init__(
        self, name: str, text: str, labels: Labels, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._histogram = Histogram(name, text, labels, buckets=bounds, registry=registry)
        self._bounds = list(bounds)
        self._pending: dict[Labels, tuple[list[int], list[float]]] = {}

    def prepare(self, every: Iterable[Labels]) -> None:
        """Begins the series of these label values at 0.

        In multiprocess mode the first of a series takes milliseconds, for an entry in a file for each bucket and now and
        then a larger file: better before anyone waits.
        """
        for labels in every:
            self._histogram.labels(*labels)

    def observe(self, labels: Labels, value: float, times: int = 1) -> None:
        """Adds an observation of these label values, or several of the same value."""
        pending = self._pending.get(labels)
        if pending is None:
            pending = self._pending[labels] = ([0] * (len(self._bounds) + 1), [0.0])
        pending[0][bisect_left(self._bounds, value)] += times
        pending[1][0] += value * times

    def flush(self) -> None:
        """Hands the observations over, bucket by bucket: prometheus_client has no call for many at once."""
        for labels, (counts, total) in self._pending.items():
            child = self._histogram.labels(*labels)
            child._sum.inc(total[0])
            for bucket, count in zip(child._buckets, counts, strict=True):
                if count:
                    bucket.inc(count)
        self._pending.clear()
