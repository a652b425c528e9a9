"""The protocol's statistics: sums over processes, live and dead."""

from __future__ import annotations

from tests.support.local_totals import LocalTotals
from tilewire.service.ipc.messages import Timings
from tilewire.service.telemetry.counters import MetricSet
from tilewire.service.telemetry.exposition import MAX_PROGRAMS, Totals
from tilewire.service.telemetry.statistics import (
    BatchStats,
    Duration,
    InferenceStats,
    LaunchStatistics,
    RequestStatistics,
    statistics_of,
)


def count(totals: Totals, source: str) -> None:
    metrics = MetricSet(LocalTotals(totals, source))
    requests, launches = RequestStatistics(metrics), LaunchStatistics(metrics)
    for _ in range(3):
        requests.count("add", "", 2e-6, Timings(10, 20, 30, 40))
    requests.count("add", "", 1e-6, None)
    requests.count("softmax", "", 5e-6, None)
    launches.count("add", "", 2, Timings(0, 20, 30, 40))
    launches.count("add", "", 1, Timings(0, 2, 3, 4))
    launches.count("add", "", 16, Timings(0, 200, 2**52, 400))
    for _ in range(2):
        requests.flush()
        metrics.flush()


def test_sums_over_processes_that_are_gone() -> None:
    totals = Totals()
    for source in ("one", "other"):
        count(totals, source)
        totals.end(source)
    models = ("add", "softmax", "matmul")
    add, softmax, matmul = statistics_of(totals.hidden(models), models, "1")
    assert add.inference_stats == InferenceStats(
        success=Duration(6, 12_000),
        fail=Duration(2, 2_000),
        queue=Duration(6, 60),
        compute_input=Duration(6, 120),
        compute_infer=Duration(6, 180),
        compute_output=Duration(6, 240),
    )
    assert add.batch_stats == [
        BatchStats(1, Duration(2, 4), Duration(2, 6), Duration(2, 8)),
        BatchStats(2, Duration(2, 40), Duration(2, 60), Duration(2, 80)),
        BatchStats(16, Duration(2, 400), Duration(2, 2**53), Duration(2, 800)),
    ]
    assert (add.inference_count, add.execution_count) == (2 * (2 + 1 + 16), 6)
    assert add.last_inference > 1_700_000_000_000
    assert softmax.inference_stats.fail == Duration(1 * 2, 10_000)
    assert (softmax.last_inference, softmax.execution_count, softmax.batch_stats) == (0, 0, [])
    assert matmul.inference_stats == InferenceStats()
    assert list(totals.collect()) == []


def test_the_programs_that_were_run_last_are_counted_whatever_there_was_before() -> None:
    totals = Totals()
    metrics = MetricSet(LocalTotals(totals, "one"))
    requests, launches = RequestStatistics(metrics), LaunchStatistics(metrics)
    requests.count("add", "", 1e-6, None)
    names = [f"p{number}" for number in range(MAX_PROGRAMS + 2)]
    for name in [*names[:3], names[0], *names[3:], names[0]]:
        requests.count("program", name, 1e-6, None)
        launches.count("program", name, 1, Timings(0, 2, 3, 4))
        requests.flush()
        metrics.flush()
    models = ("add", "program", names[0], names[1], names[2], names[-1])
    found = statistics_of(totals.hidden(models), models, "1")
    assert [one.inference_stats.fail.count for one in found] == [1, 0, 3, 0, 0, 1]
    assert [one.execution_count for one in found] == [0, 0, 3, 0, 0, 1]
    assert len({sample.labels[0] for sample in totals.hidden(["add", "program", *names])}) == 1 + MAX_PROGRAMS


def test_nothing_was_counted_yet() -> None:
    (only,) = statistics_of(Totals().hidden(["add"]), ("add",), "1")
    assert (only.name, only.version, only.inference_count) == ("add", "1", 0)
