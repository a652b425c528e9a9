"""Buffered counters and histograms end where prometheus_client's own would."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tilewire.service.telemetry.counters import SECONDS_BUCKETS, BufferedCounter, BufferedHistogram


# A busy machine is no failure.
@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100)), max_size=50))
def test_a_flushed_histogram_is_the_one_that_observed_each(values: list[tuple[str, float]]) -> None:
    direct, buffered = CollectorRegistry(), CollectorRegistry()
    one = Histogram("seconds", "t", ("op",), buckets=SECONDS_BUCKETS, registry=direct)
    other = BufferedHistogram("seconds", "t", ("op",), SECONDS_BUCKETS, buffered)
    for op, value in values:
        one.labels(op).observe(value)
        other.observe((op,), value)
        if value > 90:
            other.flush()
    other.flush()
    for sample in [sample for family in direct.collect() for sample in family.samples]:
        if not sample.name.endswith("_created"):
            found = buffered.get_sample_value(sample.name, sample.labels)
            assert found is not None
            assert abs(found - sample.value) <= 1e-9 * max(1, abs(sample.value))


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    registry = CollectorRegistry()
    histogram = BufferedHistogram("n", "t", ("op",), (1, 2), registry)
    histogram.observe(("x",), 1)
    histogram.flush()
    assert registry.get_sample_value("n_bucket", {"op": "x", "le": "1.0"}) == 1


def test_a_prepared_histogram_is_there_with_nothing_in_it() -> None:
    registry = CollectorRegistry()
    histogram = BufferedHistogram("n", "t", ("op",), (1, 2), registry)
    histogram.prepare([("x",), ("y",)])
    assert registry.get_sample_value("n_count", {"op": "y"}) == 0
    histogram.observe(("y",), 1.5)
    histogram.flush()
    assert registry.get_sample_value("n_bucket", {"op": "y", "le": "2.0"}) == 1
    assert registry.get_sample_value("n_count", {"op": "x"}) == 0


def test_a_counter_is_handed_over_once() -> None:
    registry = CollectorRegistry()
    counter = BufferedCounter("n", "t", ("op",), registry)
    counter.inc(("x",))
    counter.inc(("x",), 4)
    assert registry.get_sample_value("n_total", {"op": "x"}) is None
    counter.flush()
    counter.flush()
    assert registry.get_sample_value("n_total", {"op": "x"}) == 5
    assert b'n_total{op="x"} 5.0' in generate_latest(registry)
