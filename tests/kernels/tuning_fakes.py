"""Pretended devices for the tests of tuning: how long a configuration takes is computed, and nothing is compiled."""

import dataclasses
import hashlib
import itertools
import json
import math

from tilewire.kernels.autotune.compiling import Facts
from tilewire.kernels.autotune.crew import Failure
from tilewire.kernels.autotune.provenance import Device
from tilewire.kernels.autotune.run import Options, tune_with
from tilewire.kernels.autotune.workloads import Product, Rows, Sum, Workload
from tilewire.kernels.matmul.configs import Config as MatmulConfig
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.selection.tables import install

FEW: tuple[Workload, ...] = (
    *(Product(m, n, k) for m, n, k in ((4096, 4096, 4096), (512, 512, 512), (1024, 1024, 4096), (128, 128, 16384))),
    Product(2048, 2048, 2048, a_major="m"),
    Product(300, 200, 100, batch=3),
    *(Product(m, 4096, 4096) for m in (1, 16, 32, 64)),
    Product(16, 512, 512),
    *(Rows(4096, n, dtype) for n in (128, 1024, 4096) for dtype in ("float32", "bfloat16")),
    Rows(4096, 65536),
    Rows(1, 1 << 20),
    *(Sum(1, n) for n in (1 << 12, 1 << 18, 1 << 22, 1 << 26)),
)
numbers = itertools.count()
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


def run(tmp_path, name="nvidia_h100", workloads=FEW, *, bench=None, compiler=None, **options):
    path = tmp_path / f"{name}.json"
    wanted = Options(workloads=workloads, out=path, **({"budget_s": 3600.0, "num_learned": 0} | options))
    tuned = tune_with(device(name), wanted, bench or FakeBench(), compiler or FakeCompiler(), lambda step: None)
    return tuned, json.loads(path.read_text())


def with_table(name, table):
    """A target that has `table`."""
    target = dataclasses.replace(KNOWN[name], name=f"test card {next(numbers)}")
    install(target.name, table)
    return target
