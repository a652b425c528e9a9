"""Counters, histograms and gauges of several processes end where prometheus_client's own would; exemplars stay theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from tests.support.local_totals import LocalTotals
from tilewire.service.gateway.telemetry.metrics import exemplar_of
from tilewire.service.telemetry.counters import MAX_REMEMBERED, SECONDS_BUCKETS, Gauge, MetricSet, Sample
from tilewire.service.telemetry.counters import Histogram as Seconds
from tilewire.service.telemetry.exposition import Exposition, Totals

BOUNDS = (1.0, 2.0)


def value_of(totals: Totals, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(totals)
    return registry.get_sample_value(name, labels)


# A busy machine is no failure.
@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100)), max_size=50))
def test_a_histogram_of_two_processes_is_the_one_that_observed_each(values: list[tuple[str, float]]) -> None:
    direct, totals = CollectorRegistry(), Totals()
    one = Histogram("seconds", "t", ("op",), buckets=SECONDS_BUCKETS, registry=direct)
    sets = [MetricSet(LocalTotals(totals, source)) for source in ("x", "y")]
    others = [metrics.histogram("seconds", "t", ("op",), SECONDS_BUCKETS) for metrics in sets]
    for index, (op, value) in enumerate(values):
        one.labels(op).observe(value)
        others[index % 2].observe((op,), value)
        if value > 90:
            sets[0].flush()
    for metrics in sets:
        metrics.flush()
    for sample in [sample for family in direct.collect() for sample in family.samples]:
        if not sample.name.endswith("_created"):
            found = value_of(totals, sample.name, **sample.labels)
            assert found is not None
            assert abs(found - sample.value) <= 1e-9 * max(1, abs(sample.value))


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    totals = Totals()
    metrics = MetricSet(LocalTotals(totals))
    metrics.histogram("n", "t", ("op",), BOUNDS).observe(("x",), 1)
    metrics.flush()
    assert value_of(totals, "n_bucket", op="x", le="1.0") == 1


def test_a_prepared_series_is_there_with_nothing_in_it() -> None:
    totals = Totals()
    metrics = MetricSet(LocalTotals(totals))
    histogram, counter = metrics.histogram("h", "t", ("op",), BOUNDS), metrics.counter("c_total", "t", ("op",))
    histogram.prepare([("x",), ("y",)])
    counter.prepare([("x",)])
    metrics.flush()
    assert value_of(totals, "h_count", op="y") == value_of(totals, "c_total", op="x") == 0
    histogram.observe(("y",), 1.5)
    metrics.flush()
    assert value_of(totals, "h_bucket", op="y", le="2.0") == 1
    assert value_of(totals, "h_count", op="x") == 0


def test_a_counter_is_sent_once() -> None:
    totals = Totals()
    metrics = MetricSet(LocalTotals(totals))
    counter = metrics.counter("n_total", "t", ("op",))
    counter.inc(("x",))
    counter.inc(("x",), 4)
    assert value_of(totals, "n_total", op="x") is None
    metrics.flush()
    metrics.flush()
    assert value_of(totals, "n_total", op="x") == 5


def test_what_a_dead_process_counted_stays_and_its_gauges_go() -> None:
    totals = Totals()
    for source, value in (("one", 3.0), ("other", 4.0)):
        metrics = MetricSet(LocalTotals(totals, source))
        metrics.counter("n_total", "t", ()).inc((), value)
        metrics.gauge("sum", "t").set((), value)
        metrics.gauge("max", "t", merge="max").set((), value)
        metrics.gauge("ever", "t", ("op",), is_shown=False).set(("x",), value)
        metrics.flush()
    names = ("n_total", "sum", "max")
    assert [value_of(totals, name) for name in names] == [7, 7, 4]
    totals.end("other")
    assert [value_of(totals, name) for name in names] == [7, 3, 3]
    totals.end("one")
    assert [value_of(totals, name) for name in names] == [7, None, None]
    # What `/metrics` does not show goes with none.
    assert totals.hidden(["x"]) == [Sample("ever", ("x",), (4,))]


def test_a_gauge_remembers_so_many_values() -> None:
    gauge = Gauge("g")
    for number in range(MAX_REMEMBERED):
        gauge.set((f"x{number}",), 1)
    assert len(gauge.take()) == MAX_REMEMBERED
    gauge.set(("x0",), 1)
    assert gauge.take() == []
    gauge.set(("another",), 1)
    assert len(gauge.take()) == 1
    # It may have another value by now: it is sent, whether or not it has.
    gauge.set(("x0",), 1)
    assert gauge.take() == [Sample("g", ("x0",), (1,))]


def test_figures_wait_while_the_supervisor_does_not_read() -> None:
    sink = LocalTotals()
    metrics = MetricSet(sink)
    counter = metrics.counter("n_total", "t", ())
    sink.is_congested = True
    for _ in range(3):
        counter.inc(())
        metrics.flush()
    assert value_of(sink.totals, "n_total") is None
    sink.is_congested = False
    metrics.flush()
    assert value_of(sink.totals, "n_total") == 3


def observe_shown(histogram: Seconds, value: float, unix_s: float, shown: Mapping[str, str] | None) -> None:
    """Observes a value, and makes it its bucket's exemplar if its id can be shown."""
    bucket = histogram.observe(("add",), value)
    if shown is not None:
        histogram.show(("add",), bucket, value, unix_s, shown)


def test_the_newest_exemplar_of_all_gateways_is_shown() -> None:
    totals = Totals()
    one, other = (MetricSet(LocalTotals(totals, source)) for source in ("one", "other"))
    first, second = (metrics.histogram("seconds", "t", ("op",), BOUNDS) for metrics in (one, other))
    observe_shown(first, 0.5, 1, exemplar_of("old", None))
    observe_shown(first, 1.5, 2, exemplar_of("middle", "f" * 32))
    one.flush()
    observe_shown(second, 1.0, 4, exemplar_of("new", None))
    observe_shown(second, 9, 5, exemplar_of("beyond", None))
    observe_shown(second, 9, 6, exemplar_of('qu"oted', None))
    other.flush()
    # Older than what is shown, and sent later.
    observe_shown(first, 0.7, 3, exemplar_of("late", None))
    one.flush()
    body, content_type = asyncio.run(Exposition(totals).read(openmetrics=True))
    assert content_type.startswith("application/openmetrics-text")
    (family,) = openmetrics_families(body.decode())
    assert {
        float(sample.labels["le"]): (sample.exemplar.labels, sample.exemplar.value)
        for sample in family.samples
        if sample.exemplar is not None
    } == {
        1.0: ({"request_id": "new"}, 1.0),
        2.0: ({"request_id": "middle", "trace_id": "f" * 32}, 1.5),
        float("inf"): ({"request_id": "beyond"}, 9),
    }
    text, content_type = asyncio.run(Exposition(totals).read(openmetrics=False))
    assert content_type.startswith("text/plain")
    assert b"# {" not in text


@pytest.mark.parametrize(
    ("request_id", "trace_id", "labels"),
    [
        ("i" * 119, None, None),
        ("i" * 118, "f" * 32, {"request_id": "i" * 118}),
        ('qu"oted', None, None),
        ("i", "f" * 32, {"request_id": "i", "trace_id": "f" * 32}),
    ],
)
def test_exemplar_labels_that_do_not_fit_are_left_out(
    request_id: str, trace_id: str | None, labels: dict[str, str] | None
) -> None:
    assert exemplar_of(request_id, trace_id) == labels


def test_all_who_wait_share_one_text_and_it_is_never_old() -> None:
    period_s = 0.02
    totals = Totals()
    metrics = MetricSet(LocalTotals(totals))
    counter = metrics.counter("n_total", "t", ())

    async def run() -> None:
        exposition = Exposition(totals, period_s)
        await exposition.read(openmetrics=False)
        began_s = time.monotonic()
        readers = [asyncio.create_task(exposition.read(openmetrics=False)) for _ in range(20)]
        await asyncio.sleep(0)
        # Counted after they asked and before the text was due.
        counter.inc(())
        metrics.flush()
        texts = {body for body, _content_type in await asyncio.gather(*readers)}
        assert len(texts) == 1
        assert b"n_total 1.0" in texts.pop()
        assert time.monotonic() - began_s >= period_s / 2

    asyncio.run(run())
