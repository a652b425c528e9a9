"""Races: the fastest wins, the slow are dropped early, failures never win."""

import math

import pytest

from benchmarks.bench_dispatch import measure_all, shapes, summarise
from tilewire.kernels.autotune.alternatives import alternatives, chosen
from tilewire.kernels.autotune.compiling import Facts
from tilewire.kernels.autotune.crew import Failure
from tilewire.kernels.autotune.exhaustive import Everything
from tilewire.kernels.autotune.racing import Heats, race
from tilewire.kernels.autotune.workloads import Product, Rows, Sum
from tilewire.kernels.runtime.targets import KNOWN

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


class InterruptedBench(FakeBench):
    """Something interrupts the first single call of some."""

    def __init__(self, times, interrupted):
        super().__init__(times)
        self.interrupted = interrupted
        self.num_passes = 0

    def once_us(self, workload, configs):
        self.num_passes += 1
        late_us = 90.0 if self.num_passes == 1 else 0.0
        times = super().once_us(workload, configs)
        return [us + late_us * (config in self.interrupted) for config, us in zip(configs, times, strict=True)]


def test_an_interrupted_call_does_not_lose_the_race():
    best, other = CONFIGS[:2]
    times = race(InterruptedBench({best: 2.0, other: 3.0}, {best}), WORKLOAD, CONFIGS)
    assert min(times, key=times.__getitem__) == best
    assert times[best] == 2.0


class LuckyBench(FakeBench):
    """Some configurations look faster in the races than they are, which shows when few run in turns for long."""

    def __init__(self, times, lucky):
        super().__init__(times)
        self.lucky = lucky

    def in_turns_us(self, workload, configs, rounds):
        times = super().in_turns_us(workload, configs, rounds)
        if len(configs) == 2 and rounds > 15:
            return times
        return [self.lucky.get(config, time_us) for config, time_us in zip(configs, times, strict=True)]


def test_the_luckiest_reading_is_not_the_best_time():
    ours = chosen(WORKLOAD, H100)
    other = next(config for config in CONFIGS if config != ours)
    (row,) = measure_all([WORKLOAD], H100, LuckyBench({ours: 100.0, other: 102.0}, {other: 80.0}), 1.0, lambda: 0.0)
    assert (row["regret"], row["us"], row["best_us"]) == (1.0, 100.0, 100.0)
    (row,) = measure_all([WORKLOAD], H100, LuckyBench({ours: 100.0, other: 90.0}, {other: 80.0}), 1.0, lambda: 0.0)
    assert (row["regret"], row["best"]) == (pytest.approx(100 / 90), str(other))


class PretendingCompiler:
    """Compiles what it is told it can."""

    def __init__(self, is_able):
        self.is_able = is_able
        self.recipes = []

    def compile(self, recipes, on_done, is_over):
        for recipe in recipes:
            self.recipes.append(recipe)
            on_done(recipe, Facts(1024, 64, 0, 128) if self.is_able(recipe.config) else Failure("no"))


@pytest.mark.parametrize(
    "workload",
    [
        Product(96, 512, 2048),
        Product(8, 4096, 4096, dtype="int8", b_major="k"),
        Product(300, 300, 301, dtype="float32", is_padded=False),
        Rows(64, 3000),
        Rows(8, 65536, "bfloat16"),
        Sum(1, 1 << 20),
    ],
    ids=lambda workload: f"{workload.op} {workload.dtype}",
)
def test_beyond_the_catalogue_is_what_tuning_would_try_and_each_is_compiled_once(workload):
    compiler = PretendingCompiler(lambda config: config.num_warps == 4)
    everything = Everything(H100, compiler)
    found = everything.candidates(workload)
    assert found
    assert {config.num_warps for config in found} == {4}
    assert len(compiler.recipes) == len(set(compiler.recipes)) == everything.num_compiled
    assert everything.candidates(workload) == found
    assert len(compiler.recipes) == everything.num_compiled
    if isinstance(workload, Product):
        # Of whatever compiles, more than the catalogue was built with.
        assert set(found) - set(alternatives(workload, H100))


def test_what_runs_beyond_the_catalogue_can_be_the_best():
    beyond = Everything(H100, PretendingCompiler(lambda config: True)).candidates(WORKLOAD)
    faster = next(config for config in beyond if config not in CONFIGS)
    bench = FakeBench({chosen(WORKLOAD, H100): 100.0, faster: 50.0})
    everything = Everything(H100, PretendingCompiler(lambda config: True))
    (row,) = measure_all([WORKLOAD], H100, bench, 1.0, lambda: 0.0, everything)
    assert (row["best"], row["regret"]) == (str(faster), 2.0)
    assert row["num_tried"] > len(CONFIGS)


def test_shapes_can_be_asked_for_by_op_and_field():
    drawn = shapes(3, 200, H100)
    some = shapes(3, 200, H100, ["matmul"], ["dtype=int8", "batch=1"])
    assert some == [each for each in drawn if isinstance(each, Product) and each.dtype == "int8" and each.batch == 1]
    assert 0 < len(some) < 50
