"""Races: the fastest wins, the slow are dropped early, failures never win."""

import math

from tilewire.kernels.autotune.halving import Rounds, race
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.runtime.targets import KNOWN

H100 = KNOWN["nvidia_h100"]
WORKLOAD = MatmulShape(4096, 4096, 4096)
CONFIGS = list(dict.fromkeys(WORKLOAD.candidates(H100)))


class FakeBench:
    """Configurations take as long as it is runtime_args, and it remembers who ran how often."""

    def __init__(self, times, default=1000.0):
        self.times = times
        self.default = default
        self.rounds = []

    def once_us(self, workload, configs):
        return [self.times.get(config, self.default) + 1 for config in configs]

    def in_turns_us(self, workload, configs, rounds):
        self.rounds.append((len(configs), rounds))
        return [self.times.get(config, self.default) for config in configs]


def test_the_fastest_wins_and_the_slow_are_timed_once():
    bench = FakeBench({config: 100.0 + 7 * number for number, config in enumerate(CONFIGS)})
    times = race(bench, WORKLOAD, CONFIGS)
    assert min(times, key=times.__getitem__) == CONFIGS[0]
    assert set(times) == set(CONFIGS)
    assert bench.rounds == [(min(6, len(CONFIGS)), 3), (min(6, len(CONFIGS)), 15)]


def test_what_must_run_runs_to_the_end():
    bench = FakeBench({CONFIGS[0]: 1.0, CONFIGS[-1]: 1e6})
    times = race(bench, WORKLOAD, CONFIGS, must=[CONFIGS[-1]], rounds=Rounds(finalists=1))
    assert times[CONFIGS[-1]] == 1e6
    assert bench.rounds[-1] == (2, 15)


def test_failures_have_no_time():
    bench = FakeBench({CONFIGS[0]: math.inf, CONFIGS[1]: 10.0})
    times = race(bench, WORKLOAD, CONFIGS, must=[CONFIGS[0]])
    assert CONFIGS[0] not in times
    assert min(times.values()) == 10.0


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
