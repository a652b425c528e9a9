"""Pretended devices for the tests of tuning: how long a configuration takes is computed, and nothing is compiled."""

import hashlib
import math

from kernels.matmul.configs import Config as MatmulConfig
from kernels.targets import KNOWN
from kernels.tuning.compiling import Facts
from kernels.tuning.crew import Failure
from kernels.tuning.provenance import Device

FITS = Facts(shared_bytes=30000, registers=100, spilled_bytes=0, num_threads=128)


def device(name):
    return Device(KNOWN[name], "A card", "1.2.3")


class FakeCompiler:
    """Everything compiles, but what `objection` has a reason against."""

    def __init__(self, objection=lambda recipe: None):
        self.objection = objection
        self.compiled = []

    def compile(self, recipes, on_done, is_over):
        for recipe in recipes:
            if is_over():
                return
            self.compiled.append(recipe)
            reason = self.objection(recipe)
            on_done(recipe, reason if isinstance(reason, Facts) else Failure(reason) if reason else FITS)


class FakeBench:
    """Time by waves of tiles and by bytes, and a factor that is each configuration's own; `favoured` beats all."""

    def __init__(self, favoured=lambda workload, config: False, spread=0.3, num_sms=132):
        self.favoured = favoured
        self.spread = spread
        self.num_sms = num_sms
        self.timed = []

    def us(self, workload, config):
        problem = workload.problem
        least = workload.num_bytes / 3e6 + 1
        if isinstance(config, MatmulConfig):
            steps = math.ceil(math.ceil(problem.k / config.block_k) / config.split_k)
            waves = math.ceil(config.tiles(problem) * config.split_k / self.num_sms)
            step_us = config.block_m * config.block_n * config.block_k * 3e-7
            least = max(least, waves * (2 + steps * step_us))
        if self.favoured(workload, config):
            return least / 4
        own = int(hashlib.sha256(str(config).encode()).hexdigest(), 16) % 1000 / 1000
        return least * (1 + own * self.spread)

    def once_us(self, workload, configs):
        self.timed.append(workload)
        return [self.us(workload, config) for config in configs]

    def in_turns_us(self, workload, configs, rounds):
        return [self.us(workload, config) for config in configs]

    def hot_us(self, workload, config):
        return self.us(workload, config)
