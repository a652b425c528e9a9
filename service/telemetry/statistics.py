"""What is counted for the protocol's statistics, summed over every gateway and every engine, live or dead.

Gateways count requests and launches' shares in them; engines count launches. The sums live where those of `/metrics` live, in
prometheus_client's files, so a process that dies takes nothing with it; but under names of their own, which `/metrics` leaves
out: by batch size they are too many series for a scrape. Knows no HTTP and no device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from tilewire.service.ipc.messages import Timings
from tilewire.service.ops.registry import OPS
from tilewire.service.telemetry.counters import BufferedCounter

PREFIX = "statistics_"
_REQUESTS, _REQUEST_NS = "statistics_requests", "statistics_request_ns"
_LAUNCHES, _LAUNCH_NS = "statistics_launches", "statistics_launch_ns"
_LAST = "statistics_last_ms"


class Duration(msgspec.Struct):
    """How often something happened and how long it took in all."""

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
        name: Of the op.
        version: Of the model.
        last_inference: When a request was last computed, in milliseconds of Unix time; 0 for never.
        inference_count: Requests computed.
        execution_count: Launches; the quotient is the mean batch.
        inference_stats: By outcome and part.
        batch_stats: By number of requests in a launch, ascending.
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


def _parts(timings: Timings) -> tuple[tuple[str, int], ...]:
    return (
        ("compute_input", timings.h2d_ns),
        ("compute_infer", timings.kernel_ns),
        ("compute_output", timings.d2h_ns),
    )


class RequestStatistics:
    """A gateway's share. One thread.

    Args:
        registry: Where its counters are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("op", "part")
        self._requests = BufferedCounter(_REQUESTS, "Requests.", labels, registry)
        self._request_ns = BufferedCounter(_REQUEST_NS, "Their time.", labels, registry)
        # How many, their time in all, and that of each part: one list for each op, so that a request is one look-up.
        self._computed: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (2 + len(_PARTS)))

    def count(self, op: str, seconds: float, timings: Timings | None) -> None:
        """Counts one request.

        Args:
            op: That it asked for.
            seconds: From its headers to the last byte of its answer.
            timings: Of the engine; None for a request that failed.
        """
        if timings is None:
            self._requests.inc((op, "fail"))
            self._request_ns.inc((op, "fail"), int(seconds * 1e9))
            return
        sums = self._computed[op]
        sums[0] += 1
        sums[1] += int(seconds * 1e9)
        sums[2] += timings.queue_ns
        sums[3] += timings.h2d_ns
        sums[4] += timings.kernel_ns
        sums[5] += timings.d2h_ns

    def flush(self) -> None:
        """Hands over what was counted."""
        for op, (count, *spent_ns) in self._computed.items():
            for part, part_ns in zip(("success", *_PARTS), spent_ns, strict=True):
                self._requests.inc((op, part), count)
                self._request_ns.inc((op, part), part_ns)
        self._computed.clear()
        self._requests.flush()
        self._request_ns.flush()


class LaunchStatistics:
    """An engine's share. One thread.

    Args:
        registry: Where its counters are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._launches = BufferedCounter(_LAUNCHES, "Launches.", ("op", "batch_size"), registry)
        self._launch_ns = BufferedCounter(_LAUNCH_NS, "Their time.", ("op", "batch_size", "part"), registry)
        self._last = Gauge(_LAST, "When the last one ended.", ("op",), multiprocess_mode="max", registry=registry)
        for op in OPS:
            # From 0, so that its file is there when the first launch ends.
            self._last.labels(op)
        self._last_ms: dict[str, int] = {}

    def count(self, op: str, num_requests: int, timings: Timings) -> None:
        """Counts one launch."""
        size = str(num_requests)
        self._launches.inc((op, size))
        for part, spent_ns in _parts(timings):
            self._launch_ns.inc((op, size, part), spent_ns)
        self._last_ms[op] = time.time_ns() // 10**6

    def flush(self) -> None:
        """Hands over what was counted."""
        self._launches.flush()
        self._launch_ns.flush()
        for op, last_ms in self._last_ms.items():
            self._last.labels(op).set(last_ms)
        self._last_ms.clear()


def without_statistics(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """What `/metrics` shows."""
    return (metric for metric in metrics if not metric.name.startswith(PREFIX))


def read_statistics(folder: str, ops: Sequence[str], version: str) -> list[ModelStats]:
    """Adds up what every process has handed over.

    Args:
        folder: Where the processes keep their files.
        ops: Whose statistics.
        version: Of the models.

    Raises:
        OSError: A file went away, or a process is only just making its own; so do the next three. Read again.
        ValueError: See there.
        RuntimeError: See there.
        struct.error: See there.
    """
    files = [str(path) for kind in ("counter", "gauge_max") for path in Path(folder).glob(f"{kind}_*.db")]
    stats = {op: ModelStats(op, version) for op in ops}
    batches: dict[str, dict[int, BatchStats]] = {op: {} for op in ops}
    for metric in MultiProcessCollector.merge(files, accumulate=True):  # type: ignore[no-untyped-call]
        for sample in metric.samples if metric.name.startswith(PREFIX) else ():
            op = sample.labels["op"]
            if op in stats:
                _add_sample(metric.name, sample.labels, round(sample.value), stats[op], batches[op])
    for op, by_size in batches.items():
        stats[op].batch_stats = [by_size[size] for size in sorted(by_size)]
    return list(stats.values())


def _add_sample(
    metric: str, labels: dict[str, str], value: int, stats: ModelStats, batches: dict[int, BatchStats]
) -> None:
    if metric == _LAST:
        stats.last_inference = value
    elif metric == _REQUESTS:
        getattr(stats.inference_stats, labels["part"]).count = value
    elif metric == _REQUEST_NS:
        getattr(stats.inference_stats, labels["part"]).ns = value
    else:
        size = int(labels["batch_size"])
        batch = batches.setdefault(size, BatchStats(size))
        if metric == _LAUNCH_NS:
            getattr(batch, labels["part"]).ns = value
            return
        stats.execution_count += value
        stats.inference_count += value * size
        for part in (batch.compute_input, batch.compute_infer, batch.compute_output):
            part.count = value
