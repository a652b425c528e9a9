"""Counts what the protocol's statistics report, over every gateway and every engine, live or dead.

Gateways count requests and their times in the engine; engines count launches. The sums live where those of `/metrics` live,
but `/metrics` does not show them: by batch size they are too many series for a scrape.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from tilewire.service.ipc.messages import Timings
from tilewire.service.telemetry.counters import OF_PROGRAM, MetricSet, Sample

_REQUESTS, _REQUEST_NS = "statistics_requests", "statistics_request_ns"
_LAUNCHES, _LAUNCH_NS = "statistics_launches", "statistics_launch_ns"
_LAST = "statistics_last_ms"


class Duration(msgspec.Struct):
    """Count and total duration of an event."""

    count: int = 0
    ns: int = 0


class InferenceStats(msgspec.Struct):
    """By outcome, and by part of the successful ones. Nothing is cached, so the cache is never hit."""

    success: Duration = msgspec.field(default_factory=Duration)
    fail: Duration = msgspec.field(default_factory=Duration)
    queue: Duration = msgspec.field(default_factory=Duration)
    compute_input: Duration = msgspec.field(default_factory=Duration)
    compute_infer: Duration = msgspec.field(default_factory=Duration)
    compute_output: Duration = msgspec.field(default_factory=Duration)
    cache_hit: Duration = msgspec.field(default_factory=Duration)
    cache_miss: Duration = msgspec.field(default_factory=Duration)


class BatchStats(msgspec.Struct):
    """Launches of one size."""

    batch_size: int
    compute_input: Duration = msgspec.field(default_factory=Duration)
    compute_infer: Duration = msgspec.field(default_factory=Duration)
    compute_output: Duration = msgspec.field(default_factory=Duration)


class ModelStats(msgspec.Struct):
    """All that is counted for one op.

    Attributes:
        last_inference: When a request was last computed, in milliseconds of Unix time; 0 for never.
        inference_count: Requests computed.
        execution_count: Launches; the quotient is the mean batch.
        inference_stats: Counts and times by outcome and part.
        batch_stats: Counts and times by number of requests in a launch, ascending.
    """

    name: str
    version: str
    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    inference_stats: InferenceStats = msgspec.field(default_factory=InferenceStats)
    batch_stats: list[BatchStats] = msgspec.field(default_factory=list)


# Of a request's time in the engine, as `RequestStatistics.count` adds it up.
_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


def _label_of(op: str, program: str) -> str:
    """Returns what is counted: an op, or a kept program unless its name is empty."""
    return f"{OF_PROGRAM}{program}" if program else op


class RequestStatistics:
    """A gateway's share. One thread."""

    def __init__(self, metrics: MetricSet) -> None:
        labels = ("op", "part")
        self._requests = metrics.counter(_REQUESTS, "Requests.", labels, is_shown=False)
        self._request_ns = metrics.counter(_REQUEST_NS, "Their time.", labels, is_shown=False)
        # How many, and their time in all: one list for each op, so that a request is one look-up.
        self._failed: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        # Likewise, and the time of each part.
        self._computed: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (2 + len(_PARTS)))

    def count(self, op: str, program: str, seconds: float, timings: Timings | None) -> None:
        """Counts one request of an op, or of a kept program unless its name is empty; one without timings failed.

        Its seconds are those from its headers to the last byte of its answer.
        """
        op = _label_of(op, program)
        if timings is None:
            failed = self._failed[op]
            failed[0] += 1
            failed[1] += int(seconds * 1e9)
            return
        sums = self._computed[op]
        sums[0] += 1
        sums[1] += int(seconds * 1e9)
        sums[2] += timings.queue_ns
        sums[3] += timings.h2d_ns
        sums[4] += timings.kernel_ns
        sums[5] += timings.d2h_ns

    def flush(self) -> None:
        """Moves what was counted to the counters, before these are flushed."""
        for op, (count, *spent_ns) in self._computed.items():
            for part, part_ns in zip(("success", *_PARTS), spent_ns, strict=True):
                self._requests.inc((op, part), count)
                self._request_ns.inc((op, part), part_ns)
        for op, (count, whole_ns) in self._failed.items():
            self._requests.inc((op, "fail"), count)
            self._request_ns.inc((op, "fail"), whole_ns)
        self._computed.clear()
        self._failed.clear()


class LaunchStatistics:
    """An engine's share. One thread."""

    def __init__(self, metrics: MetricSet) -> None:
        self._launches = metrics.counter(_LAUNCHES, "Launches.", ("op", "batch_size"), is_shown=False)
        self._launch_ns = metrics.counter(_LAUNCH_NS, "Their time.", ("op", "batch_size", "part"), is_shown=False)
        self._last = metrics.gauge(_LAST, "End of the last launch.", ("op",), merge="max", is_shown=False)

    def count(self, op: str, program: str, num_requests: int, timings: Timings) -> None:
        """Counts one launch of an op, or of a kept program unless its name is empty."""
        op = _label_of(op, program)
        size = str(num_requests)
        self._launches.inc((op, size))
        spent = timings.h2d_ns, timings.kernel_ns, timings.d2h_ns
        for part, spent_ns in zip(_PARTS[1:], spent, strict=True):
            self._launch_ns.inc((op, size, part), spent_ns)
        self._last.set((op,), time.time_ns() // 10**6)


def statistics_of(samples: Iterable[Sample], ops: Sequence[str], version: str) -> list[ModelStats]:
    """Arranges the sums over all processes by op and batch size; leaves others than those of this module out."""
    stats = {op: ModelStats(op, version) for op in ops}
    batches: dict[str, dict[int, BatchStats]] = {op: {} for op in ops}
    for sample in samples:
        op = sample.labels[0].removeprefix(OF_PROGRAM)
        if op in stats:
            _add_sample(sample, stats[op], batches[op])
    for op, by_size in batches.items():
        stats[op].batch_stats = [by_size[size] for size in sorted(by_size)]
    return list(stats.values())


def _add_sample(sample: Sample, stats: ModelStats, batches: dict[int, BatchStats]) -> None:
    (value,) = map(int, sample.values)
    if sample.name == _LAST:
        stats.last_inference = value
    elif sample.name == _REQUESTS:
        getattr(stats.inference_stats, sample.labels[1]).count = value
    elif sample.name == _REQUEST_NS:
        getattr(stats.inference_stats, sample.labels[1]).ns = value
    else:
        size = int(sample.labels[1])
        batch = batches.setdefault(size, BatchStats(size))
        if sample.name == _LAUNCH_NS:
            getattr(batch, sample.labels[2]).ns = value
            return
        stats.execution_count += value
        stats.inference_count += value * size
        for part in (batch.compute_input, batch.compute_infer, batch.compute_output):
            part.count = value
