"""Adds up the metrics of all processes and writes them as Prometheus or OpenMetrics text. Runs in the supervisor.

Counters and histograms of a process that died stay in the sums; its gauges go.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as ShownExemplar
from prometheus_client.utils import floatToGoString

from tilewire.service.telemetry.counters import (
    OF_PROGRAM,
    Exemplar,
    Figures,
    Labels,
    LastFailures,
    MetricSpec,
    Sample,
)

# Writing the text takes milliseconds. A call sooner than this after the last time waits, and gets the next text.
PERIOD_S = 0.1

OPENMETRICS = "application/openmetrics-text"

# Kept programs whose sums are held, also of deleted ones.
MAX_PROGRAMS = 1024


class HiddenSums:
    """Sums over all processes that `/metrics` does not show, by op and by kept program.

    Those of a program are dropped when so many others were run since.
    """

    def __init__(self, max_programs: int = MAX_PROGRAMS) -> None:
        self._max_programs = max_programs
        # By the first label: values by metric and labels.
        self._ops: dict[str, dict[tuple[str, Labels], int | float]] = {}
        self._programs: OrderedDict[str, dict[tuple[str, Labels], int | float]] = OrderedDict()

    def add(self, spec: MetricSpec, labels: Labels, value: float) -> None:
        """Adds the increment of a counter, or the value of a gauge, of which the largest stays, also of dead processes."""
        first, key = labels[0], (spec.name, labels)
        if first.startswith(OF_PROGRAM):
            series = self._programs.setdefault(first, {})
            self._programs.move_to_end(first)
            if len(self._programs) > self._max_programs:
                self._programs.popitem(last=False)
        else:
            series = self._ops.setdefault(first, {})
        before = series.get(key, 0)
        series[key] = before + value if spec.kind == "counter" else max(before, value)

    def samples(self, models: Iterable[str]) -> list[Sample]:
        """Returns the sums of the ops and kept programs of these names."""
        every = (
            series
            for model in models
            for series in (self._ops.get(model, {}), self._programs.get(f"{OF_PROGRAM}{model}", {}))
        )
        return [Sample(name, labels, (value,)) for series in every for (name, labels), value in series.items()]


class Totals(Collector):
    """Sums over all processes, live or dead.

    Attributes:
        failures: Last failures of all processes.
    """

    def __init__(self) -> None:
        self.failures = LastFailures()
        self._specs: dict[str, MetricSpec] = {}
        self._sums: defaultdict[str, dict[Labels, list[int | float]]] = defaultdict(dict)
        self._gauges: defaultdict[str, dict[tuple[str, Labels], int | float]] = defaultdict(dict)
        self._exemplars: dict[tuple[str, Labels, int], Exemplar] = {}
        self._hidden = HiddenSums()

    def add(self, source: str, figures: Figures) -> None:
        """Adds what a process sent; its successor has the same name."""
        for spec in figures.specs:
            self._specs[spec.name] = spec
        for name, labels, values in ((one.name, one.labels, one.values) for one in figures.samples):
            spec = self._specs[name]
            if not spec.is_shown:
                self._hidden.add(spec, labels, values[0])
            elif spec.kind == "gauge":
                self._gauges[name][source, labels] = values[0]
            elif (sums := self._sums[name].get(labels)) is None:
                self._sums[name][labels] = list(values)
            else:
                for index, value in enumerate(values):
                    sums[index] += value
        for failure in figures.failures:
            self.failures.add(failure)
        for seen in figures.exemplars:
            # Processes send their figures when it suits them: what comes last need not be the newest.
            key = (seen.name, seen.labels, seen.bucket)
            if (before := self._exemplars.get(key)) is None or before.unix_s <= seen.unix_s:
                self._exemplars[key] = seen

    def end(self, source: str) -> None:
        """Removes the gauges of a process that is gone."""
        for gauges in self._gauges.values():
            for key in [key for key in gauges if key[0] == source]:
                del gauges[key]

    def sums(self, name: str) -> dict[Labels, tuple[int | float, ...]]:
        """The sums of a counter or a histogram by label values; a copy."""
        return {labels: tuple(values) for labels, values in self._sums[name].items()}

    def hidden(self, models: Iterable[str]) -> list[Sample]:
        """The sums that `/metrics` does not show, of the ops and kept programs of these names."""
        return self._hidden.samples(models)

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's call: the families that `/metrics` shows."""
        for spec in self._specs.values():
            if not spec.is_shown:
                continue
            series = self._series(spec).items()
            if spec.kind == "histogram":
                histogram = HistogramMetricFamily(spec.name, spec.text, labels=spec.labels)
                for labels, (*counts, total) in series:
                    histogram.add_metric(labels, self._buckets(spec, labels, counts), total)
                yield histogram
                continue
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = kind(spec.name, spec.text, labels=spec.labels)
            for labels, (value,) in series:
                family.add_metric(labels, value)
            yield family

    def _series(self, spec: MetricSpec) -> dict[Labels, list[int | float]]:
        if spec.kind != "gauge":
            return self._sums[spec.name]
        by_labels: defaultdict[Labels, list[int | float]] = defaultdict(list)
        for (_source, labels), value in self._gauges[spec.name].items():
            by_labels[labels].append(value)
        merge: Callable[[list[int | float]], int | float] = sum if spec.merge == "sum" else max
        return {labels: [merge(values)] for labels, values in by_labels.items()}

    def _buckets(
        self, spec: MetricSpec, labels: Labels, counts: list[int | float]
    ) -> list[tuple[str, float] | tuple[str, float, ShownExemplar]]:
        bounds = [*map(floatToGoString, spec.bounds), "+Inf"]
        seen = [self._exemplars.get((spec.name, labels, bucket)) for bucket in range(len(bounds))]
        return [
            (bound, count) if one is None else (bound, count, ShownExemplar(dict(one.shown), one.value, one.unix_s))
            for bound, count, one in zip(bounds, accumulate(counts), seen, strict=True)
        ]


class Exposition:
    """Writes the text of `/metrics`, once for all who wait for it; two texts of one format are `period_s` apart, or more."""

    def __init__(self, totals: Totals, period_s: float = PERIOD_S) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(totals)
        self._period_s = period_s
        self._written_s: dict[bool, float] = {}
        self._waiting: dict[bool, asyncio.Task[bytes]] = {}

    async def read(self, *, openmetrics: bool) -> tuple[bytes, str]:
        """Returns the text and its content type: OpenMetrics, with exemplars, or Prometheus text."""
        encode, content_type = choose_encoder(OPENMETRICS if openmetrics else "")
        if openmetrics not in self._waiting:
            self._waiting[openmetrics] = asyncio.create_task(self._write(encode, openmetrics=openmetrics))
        return await asyncio.shield(self._waiting[openmetrics]), content_type

    async def _write(self, encode: Callable[[CollectorRegistry], bytes], *, openmetrics: bool) -> bytes:
        due_s = self._written_s.get(openmetrics, 0.0) + self._period_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        # Later callers get a text that is written later.
        del self._waiting[openmetrics]
        self._written_s[openmetrics] = time.monotonic()
        return plain_aliases(encode(self._registry))


_EXPONENT = re.compile(rb"^(nv_gpu_\w+\{[^}\n]*\} )(\d[\d.]*e[+-]\d+)$", re.MULTILINE)


def plain_aliases(exposition: bytes) -> bytes:
    """Writes the values of the `nv_gpu_` metrics without an exponent: load generators read digits and a point."""
    return _EXPONENT.sub(lambda found: found[1] + format(Decimal(found[2].decode()), "f").encode(), exposition)
