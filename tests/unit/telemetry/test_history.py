"""The ring of the last ten minutes: increases by interval, percentiles, its bound, and the last failures."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.gateway_bench import until
from tests.support.local_totals import LocalTotals
from tilewire.service.telemetry.counters import MAX_FAILING_KEYS, MAX_FAILURES, SECONDS_BUCKETS, Failure, MetricSet
from tilewire.service.telemetry.exposition import Totals
from tilewire.service.telemetry.history import MAX_INTERVALS, REJECTED, REQUESTS, SECONDS, History, Sums, quantile


class Failing(Totals):
    """Figures that cannot be added up at first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def sums(self, name: str) -> Sums:
        self.num_reads += 1
        if self.num_reads == 1:
            raise ValueError("no sums")
        return super().sums(name)


def test_an_interval_that_fails_is_left_out_and_the_next_ones_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    history = History(Failing(), period_s=0.001)

    async def run() -> None:
        keeping = asyncio.create_task(history.keep())
        await until(lambda: bool(history.report(None).intervals))
        keeping.cancel()

    asyncio.run(run())
    assert caplog.text.count("an interval of the history is left out") == 1


def failure(number: int, key: str | None = None) -> Failure:
    return Failure(float(number), "POST", "/v1/add", "add", 400, "invalid_request", f"id-{number}", key)


def test_an_interval_has_what_was_added_in_it() -> None:
    totals = Totals()
    metrics = MetricSet(LocalTotals(totals))
    requests = metrics.counter(REQUESTS, "t", ("op", "code"))
    refused = metrics.counter(REJECTED, "t", ("reason",))
    seconds = metrics.histogram(SECONDS, "t", ("op",), SECONDS_BUCKETS)
    history = History(totals)
    for amount in (2, 3):
        requests.inc(("add", "200"), amount)
        requests.inc(("add", "429"), amount * 10)
        refused.inc(("too_busy",), amount * 10)
        seconds.observe(("add",), 0.001, amount)
        metrics.flush()
        history.note(100.0 + amount, 1000.0 + amount)
    history.note(110.0, 1010.0)
    _, second, idle = history.report(None).intervals
    assert (second.end, second.seconds) == (1003.0, 1.0)
    assert second.requests == {"add": 33}
    assert second.statuses == {"429": 30}
    assert second.refused == {"too_busy": 30}
    assert second.latency.keys() == {"p50", "p90", "p99"}
    assert 0.0005 < second.latency["p50"] < 0.002
    assert (idle.requests, idle.statuses, idle.refused, idle.latency) == ({}, {}, {}, {})


def test_a_series_that_another_process_adds_to_counts_once() -> None:
    totals = Totals()
    history = History(totals)
    for source in ("gateway-0", "gateway-1"):
        metrics = MetricSet(LocalTotals(totals, source))
        metrics.counter(REQUESTS, "t", ("op", "code")).inc(("add", "200"))
        metrics.flush()
    history.note(1.0, 1.0)
    assert history.report(None).intervals[0].requests == {"add": 2}


def test_it_keeps_ten_minutes() -> None:
    history = History(Totals())
    for number in range(MAX_INTERVALS + 5):
        history.note(float(number), float(number))
    kept = history.report(None)
    assert len(kept.intervals) == MAX_INTERVALS
    assert len(kept.intervals) * kept.period_s == 600
    assert kept.intervals[-1].end == MAX_INTERVALS + 4


def test_the_last_failures_are_kept_over_all_processes() -> None:
    totals = Totals()
    one, other = (MetricSet(LocalTotals(totals, source)) for source in ("a", "b"))
    for number in range(MAX_FAILURES):
        one.note(failure(number))
        if number % 10 == 9:
            one.flush()
    other.note(failure(MAX_FAILURES))
    other.flush()
    kept = History(totals).report(None).failures
    assert len(kept) == MAX_FAILURES
    assert [kept[0].request_id, kept[-1].request_id] == [f"id-{MAX_FAILURES}", "id-1"]


def test_failures_are_in_the_order_of_their_times_whichever_process_sends_first() -> None:
    totals = Totals()
    one, other = (MetricSet(LocalTotals(totals, source)) for source in ("a", "b"))
    for number in range(10):
        (one, other)[number % 2].note(failure(number))
    other.flush()
    one.flush()
    assert [kept.request_id for kept in History(totals).report(None).failures] == [f"id-{n}" for n in range(9, -1, -1)]


def test_a_flood_of_failures_between_two_flushes_is_bounded() -> None:
    totals = Totals()
    metrics = MetricSet(LocalTotals(totals))
    for number in range(10 * MAX_FAILURES):
        metrics.note(failure(number))
    metrics.flush()
    assert totals.failures.newest(None)[0].request_id == f"id-{10 * MAX_FAILURES - 1}"


def test_failures_of_others_and_of_nobody_do_not_push_out_those_of_a_key() -> None:
    totals = Totals()
    metrics = MetricSet(LocalTotals(totals))
    metrics.note(failure(0, "quiet"))
    for number in range(1, 3 * MAX_FAILURES):
        metrics.note(failure(number, None if number % 2 else "loud"))
    metrics.flush()
    history = History(totals)
    assert [one.request_id for one in history.report("quiet").failures] == ["id-0"]
    assert len(history.report("loud").failures) == MAX_FAILURES
    # Whoever sees all sees the last of all keys, and as many without one, in order.
    times = [one.time for one in history.report(None).failures]
    assert times == sorted(range(MAX_FAILURES, 3 * MAX_FAILURES), reverse=True)
    assert history.report("nobody").failures == []


def test_failures_are_kept_of_so_many_keys() -> None:
    totals = Totals()
    metrics = MetricSet(LocalTotals(totals))
    for number in range(MAX_FAILING_KEYS):
        metrics.note(failure(number, f"key-{number}"))
    metrics.note(failure(MAX_FAILING_KEYS, "key-0"))
    metrics.note(failure(MAX_FAILING_KEYS + 1, "another"))
    metrics.flush()
    history = History(totals)
    assert [len(history.report(f"key-{number}").failures) for number in range(3)] == [2, 0, 1]


@pytest.mark.parametrize(("q", "expected"), [(0.25, 0.5), (0.7, 1.5), (1.0, 2.0)])
def test_quantiles_are_those_of_prometheus(q: float, expected: float) -> None:
    assert quantile(q, [5, 4, 1], (1.0, 2.0)) == expected
