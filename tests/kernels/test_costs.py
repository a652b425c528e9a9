"""The model of time: what it predicts, what it is fitted to, and that a choice by it costs little."""

import gzip
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.tuning_fakes import FakeBench
from tilewire.kernels.autotune.alternatives import alternatives, chosen
from tilewire.kernels.autotune.drawing import draw
from tilewire.kernels.autotune.fitting import Sample, fit
from tilewire.kernels.autotune.learning import key_of, learn
from tilewire.kernels.autotune.relearning import choice_by_table
from tilewire.kernels.autotune.workloads import Product, geomean, parse_line
from tilewire.kernels.matmul import timing
from tilewire.kernels.matmul.choice import choose
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.selection import tables
from tilewire.kernels.selection.cost_model import BENDS, LAYOUTS, TERMS, Costs, Forecast, Work
from tilewire.kernels.softmax.choice import choose as choose_softmax

H100 = KNOWN["nvidia_h100"]
NUM_SMS = 132


def costs_of(**us):
    named = dict.fromkeys(TERMS, 0.0) | {name.replace("_", " "): value for name, value in us.items()}
    return Costs(2, tuple(named.values()), (0.0,) * len(LAYOUTS), (0.0,) * len(BENDS))


def test_waves_turns_and_steps_add_up():
    work = Work(tiles=3 * NUM_SMS, steps=10, read_mb=0.0, written_mb=0.0, step_mb=0.0)
    costs = costs_of(start=1.0, wave=10.0, turn=100.0, step_of_a_turn=1.0)
    # Two waves of two programs a multiprocessor, three turns of ten steps.
    assert Forecast(work, costs, NUM_SMS).us(1) == pytest.approx(1 + 2 * 10 + 3 * 100 + 30)


def test_the_longest_of_steps_and_bytes_hides_the_other():
    work = Work(tiles=1, steps=10, read_mb=100.0, written_mb=0.0, step_mb=0.0)
    costs = costs_of(step_of_a_turn=1.0, megabyte_read=1.0)
    assert Forecast(work, costs, NUM_SMS).us(1) == pytest.approx(100.0, rel=0.01)


def test_a_split_shortens_programs_and_costs_its_sums():
    work = Work(tiles=1, steps=16, read_mb=0.0, written_mb=0.0, step_mb=0.0, tile_mb=1.0)
    costs = costs_of(step_of_a_turn=1.0, split=2.0, megabyte_summed=0.5)
    forecast = Forecast(work, costs, NUM_SMS)
    assert forecast.us(1) == pytest.approx(16.0)
    assert forecast.us(4) == pytest.approx(4.0 + 2.0 + 4 * 0.5)


def test_a_factor_is_believed_within_bounds():
    work = Work(tiles=1, steps=1, read_mb=0.0, written_mb=0.0, step_mb=0.0)
    costs = costs_of(start=1.0)
    wild = replace(costs, bend=(100.0, *costs.bend[1:]))
    assert Forecast(work, wild, NUM_SMS).us(1) == pytest.approx(math.exp(0.6))


def test_fitting_finds_the_costs_that_made_the_times():
    generator = random.Random(1)
    truth = {
        "small": costs_of(start=1.0, turn=1.0, step_of_a_turn=0.2),
        "large": costs_of(start=2.0, step_of_a_turn=0.3),
    }
    works = [
        {name: Work(generator.randint(1, 900) // (1 + (name == "large")) + 1, generator.randint(1, 200), 0.1, 0.1, 0.0)}
        | {"other": Work(1, 1, 0.0, 0.0, 0.0)}
        for name in ("small", "large")
        for _ in range(60)
    ]
    samples = []
    for number, found in enumerate(works):
        for name, work in found.items():
            if name in truth:
                us = Forecast(work, truth[name], NUM_SMS).us(1)
                samples.append(Sample(number, "tma", name, work, 1, us, us, True, 64 * 128, 64 * 128 * 64))
    fitted = fit(samples, NUM_SMS)
    for sample in samples:
        us = Forecast(sample.work, fitted["tma", sample.entry], NUM_SMS).us(1)
        assert us == pytest.approx(sample.us, rel=0.25)


def drawn(count, seed):
    found = draw(random.Random(seed), H100)
    return [each for each in (next(found) for _ in range(count)) if key_of(each)]


def test_what_is_learned_of_a_pretended_device_chooses_better_on_other_workloads():
    bench = FakeBench(spread=0.6)
    halves = [each for each in drawn(900, 1) if key_of(each) == "matmul half"]
    raced = {each: {config: bench.us(each, config) for config in alternatives(each, H100)} for each in halves}
    known, unknown = halves[::2], halves[1::2]
    by_table = {each: choice_by_table(each, H100) for each in halves}
    table_us = [bench.us(each, by_table[each]) for each in halves[1::2]]
    costs = learn({each: raced[each] for each in known}, by_table, H100)
    target = replace(H100, name="test card that learned")
    tables.install(target.name, tables.table_for(H100) | {"costs": costs})
    ours = geomean([raced[each][chosen(each, target)] / min(raced[each].values()) for each in unknown])
    theirs = geomean([us / min(raced[each].values()) for us, each in zip(table_us, unknown, strict=True)])
    assert costs["matmul half"]["held_out"]["geomean"] < costs["matmul half"]["held_out"]["by_table"]
    assert ours < 1.1 < theirs


def test_too_few_workloads_teach_nothing():
    bench = FakeBench()
    few = drawn(30, 2)
    raced = {each: {config: bench.us(each, config) for config in alternatives(each, H100)} for each in few}
    assert learn(raced, {each: choice_by_table(each, H100) for each in few}, H100) == {}


def test_a_device_without_costs_of_its_own_chooses_as_its_table_says():
    stranger = replace(H100, name="nvidia_h20", num_sms=78)
    for each in drawn(60, 3):
        assert chosen(each, stranger) == choice_by_table(each, stranger)


def test_costs_do_not_reach_past_what_they_were_fitted_to():
    beyond = Product(16384, 16384, 16384).problem
    assert timing.by_time(beyond, H100, is_plain=True) is None
    assert timing.by_time(replace(beyond, k=0), H100, is_plain=True) is None
    assert choose(beyond, H100).block_m * choose(beyond, H100).block_n == 128 * 256


def measured():
    path = Path(__file__).with_name("measured_h100.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            yield parse_line(json.dumps(entry["workload"])), entry["us"]


def test_choices_are_near_the_best_of_what_was_measured():
    """On an H100 80GB HBM3 (torch 2.11.0, Triton 3.6.0, 2026-11-21 and -22): every twentieth workload, left out of the fit."""
    regrets, by_table, num_workloads = [], [], 0
    for workload, times in measured():
        us = {name: times.get(str(of(workload, H100))) for name, of in (("ours", chosen), ("table", choice_by_table))}
        num_workloads += bool(key_of(workload))
        # A single call that something interrupted says nothing of a choice.
        if us["ours"] is not None and us["table"] is not None:
            regrets.append(us["ours"] / min(times.values()))
            by_table.append(us["table"] / min(times.values()))
    assert len(regrets) >= 0.95 * num_workloads > 130
    assert geomean(regrets) < 1.02 < 1.05 < geomean(by_table)
    assert sum(each <= 1.1 for each in regrets) >= 0.92 * len(regrets)


def test_softmax_of_any_rows_is_given_a_block_that_holds_them():
    for each in drawn(300, 4):
        if each.op == "softmax":
            config = choose_softmax(each.problem, H100)
            assert config.kernel != "row" or config.block_n >= each.n
