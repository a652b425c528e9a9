"""Races: the fastest wins, the slow are dropped early, failures never win."""

import math

import pytest

from benchmarks.bench_dispatch import measure_all, summarise
from kernels.alternatives import alternatives, chosen
from kernels.racing import Heats, race, regret
from kernels.targets import KNOWN
from kernels.workloads import Product, Rows

H100 = KNOWN["nvidia_h100"]
WORKLOAD = Product(4096, 4096, 4096)
CONFIGS = alternatives(WORKLOAD, H100)


class FakeBench:
    """Configurations take as long as it is told, and it remembers who ran how often."""

    def __init__(self, times, default=1000.0):
        self.times = times
        self.default = default
        self.rounds = []

    def once_us(self, workload, configs):
        return [self.times.get(config, self.default) + 5 for config in configs]

    def in_turns_us(self, workload, configs, rounds):
        self.rounds.append((len(configs), rounds))
        return [self.times.get(config, self.default) for config in configs]

    def hot_us(self, workload, config):
        return self.times.get(config, self.default)


def test_the_fastest_wins_and_the_slow_are_timed_once():
    bench = FakeBench({config: 100.0 + 10 * number for number, config in enumerate(CONFIGS)})
    times = race(bench, WORKLOAD, CONFIGS)
    assert min(times, key=times.__getitem__) == CONFIGS[0]
    assert set(times) == set(CONFIGS)
    assert bench.rounds == [(min(6, len(CONFIGS)), 3), (min(6, len(CONFIGS)), 15)]


def test_what_must_run_runs_to_the_end():
    bench = FakeBench({CONFIGS[0]: 1.0, CONFIGS[-1]: 1e6})
    times = race(bench, WORKLOAD, CONFIGS, must=[CONFIGS[-1]], heats=Heats(finalists=1))
    assert times[CONFIGS[-1]] == 1e6
    assert bench.rounds[-1] == (2, 15)
    assert regret(times, CONFIGS[-1]) == 1e6


def test_failures_have_no_time():
    bench = FakeBench({CONFIGS[0]: math.inf, CONFIGS[1]: 10.0})
    times = race(bench, WORKLOAD, CONFIGS, must=[CONFIGS[0]])
    assert CONFIGS[0] not in times
    assert min(times.values()) == 10.0


def test_a_budget_ends_the_benchmark():
    ticks = iter(range(100))
    rows = measure_all([WORKLOAD, Rows(64, 64), WORKLOAD], H100, FakeBench({}), 1.5, lambda: next(ticks))
    assert [row["workload"]["op"] for row in rows] == ["matmul"]
    assert rows[0]["regret"] == 1.0


def test_the_summary_counts_by_op_and_in_all():
    ours = chosen(WORKLOAD, H100)
    best = next(config for config in CONFIGS if config != ours)
    rows = measure_all([WORKLOAD, Rows(64, 64)], H100, FakeBench({ours: 120.0, best: 100.0}), math.inf, lambda: 0.0)
    summary = summarise(rows)
    assert summary["matmul"] == {"shapes": 1, "geomean": pytest.approx(1.2), "most": 1.2, "within_10_percent": 0.0}
    assert summary["softmax"]["geomean"] == 1.0
    assert summary["all"]["within_10_percent"] == 0.5
