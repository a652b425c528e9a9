"""Exemplars: for each bucket of a histogram, the last request that fell into it, over all gateways.

prometheus_client's multiprocess files have no room for exemplars, so each gateway keeps its own in a small file
beside them, replaced whole at most once a second, and whoever exposes OpenMetrics puts the newest of all to each
bucket. A count is always handed over before the exemplar that belongs to it. Knows no request; runs in the gateway's
event loop.
"""

from __future__ import annotations

import contextlib
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

# OpenMetrics allows this many characters over all names and values of an exemplar's labels.
MAX_LABEL_CHARACTERS = 128

INFINITY = float("inf")

# Clients choose request ids, and a character that some parser quotes otherwise would cost the whole scrape.
_PLAIN = re.compile(rf"[A-Za-z0-9._:@/+=-]{{1,{MAX_LABEL_CHARACTERS - len('request_id')}}}", re.ASCII)


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """One observation.

    Attributes:
        op: Label of the histogram.
        bound: Upper bound of its bucket, None for infinity.
        value: What was observed.
        unix_s: When.
        labels: That lead to it: its request, its trace.
    """

    op: str
    bound: float | None
    value: float
    unix_s: float
    labels: dict[str, str]


class Exemplars:
    """The last observations of this process.

    Args:
        path: Its file; a successor of the same gateway takes it over.
        bounds: Of the buckets, without infinity.
    """

    def __init__(self, path: Path, bounds: Sequence[float]) -> None:
        self._path = path
        self._bounds = list(bounds)
        self._last: dict[tuple[str, int], tuple[float, float, str, str | None]] = {}

    def observe(self, op: str, value: float, request_id: str, trace_id: str | None) -> None:
        """Notes an observation, unless its id cannot be shown."""
        if _PLAIN.fullmatch(request_id) is not None:
            self._last[op, bisect_left(self._bounds, value)] = (value, time.time(), request_id, trace_id)

    def write(self) -> None:
        """Replaces the file."""
        seen = [
            Seen(op, self._bounds[at] if at < len(self._bounds) else None, value, unix_s, _labels(request_id, trace_id))
            for (op, at), (value, unix_s, request_id, trace_id) in self._last.items()
        ]
        draft = self._path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(seen))
        draft.replace(self._path)


def path_in(folder: Path, gateway: int) -> Path:
    """Where a gateway keeps its exemplars."""
    return folder / f"exemplars-{gateway}.json"


class WithExemplars(Collector):
    """All processes' metrics, with exemplars on the buckets of one histogram.

    Args:
        metrics: All processes'.
        folder: Where gateways keep their exemplars.
        histogram: Its name.
    """

    def __init__(self, metrics: Collector, folder: Path, histogram: str) -> None:
        self._metrics = metrics
        self._folder = folder
        self._histogram = histogram

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's call."""
        newest = {(one.op, one.bound): one for one in sorted(self._read(), key=lambda one: one.unix_s)}
        for metric in self._metrics.collect():
            if metric.name == self._histogram:
                metric.samples = [_with_exemplar(sample, newest) for sample in metric.samples]
            yield metric

    def _read(self) -> Iterable[Seen]:
        for path in self._folder.glob("exemplars-*.json"):
            with contextlib.suppress(FileNotFoundError):
                yield from msgspec.json.decode(path.read_bytes(), type=list[Seen])


def _with_exemplar(sample: Sample, newest: dict[tuple[str, float | None], Seen]) -> Sample:
    if not sample.name.endswith("_bucket"):
        return sample
    bound = float(sample.labels["le"])
    seen = newest.get((sample.labels["op"], None if bound == INFINITY else bound))
    return sample if seen is None else sample._replace(exemplar=Exemplar(seen.labels, seen.value, seen.unix_s))


def _labels(request_id: str, trace_id: str | None) -> dict[str, str]:
    """As many as fit; a part of an id would lead nowhere."""
    labels = {"request_id": request_id}
    if trace_id is not None and _length({**labels, "trace_id": trace_id}) <= MAX_LABEL_CHARACTERS:
        labels["trace_id"] = trace_id
    return labels


def _length(labels: dict[str, str]) -> int:
    return sum(len(name) + len(value) for name, value in labels.items())
