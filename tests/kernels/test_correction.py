"""Corrections of predicted times: what is learned must be what was put in, and the choice must follow it."""

import gzip
import json
import random
import re
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from tilewire.kernels.autotune.boosting import boost
from tilewire.kernels.autotune.fitting import as_text, correct, main, read
from tilewire.kernels.autotune.workloads import as_line
from tilewire.kernels.matmul.configs import Problem
from tilewire.kernels.matmul.facts import Facts, facts_of
from tilewire.kernels.matmul.members import MODEL, is_sensible, tiles_of
from tilewire.kernels.matmul.select import amounts_of, explain, ranked, select
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.op import config_text
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.selection.correction import correction_of, factor
from tilewire.kernels.selection.tables import install, table_for

H200 = KNOWN["nvidia_h200"]
PROBLEM = Problem(48, 4096, 4096, 1, "bfloat16", "bfloat16")


def test_a_correction_follows_its_questions():
    section = {"correction": {"facts": ["rows", "fill"], "trees": [[1, 0.5, 0.0, [0, 2.0, -0.5, 0.25]], 0.1]}}
    correction = correction_of(section, ("fill", "steps", "rows"))
    found = [factor(correction, facts) for facts in ((0.5, 9.0, 9.0), (0.6, 9.0, 2.0), (0.6, 0.0, 3.0))]
    assert np.log(found) == pytest.approx([0.1, -0.4, 0.35])
    assert factor((), (1.0,)) == 1.0
    assert correction_of({}, ("fill",)) == ()


def test_a_correction_by_an_unknown_fact_is_refused():
    with pytest.raises(ValueError, match="weather"):
        correction_of({"correction": {"facts": ["weather"], "trees": [0.1]}}, Facts._fields)


def test_trees_find_what_depends_on_two_facts_together():
    generator = np.random.default_rng(5)
    facts = generator.uniform(size=(2000, 3))
    wanted = np.where((facts[:, 0] > 0.4) & (facts[:, 2] <= 0.7), 0.2, -0.1).astype(np.float64)
    trees = correction_of({"correction": {"facts": "abc", "trees": boost(facts, wanted, np.ones(2000))}}, "abc")
    others = generator.uniform(size=(500, 3))
    predicted = np.array([np.log(factor(trees, each)) for each in others])
    truth = np.where((others[:, 0] > 0.4) & (others[:, 2] <= 0.7), 0.2, -0.1)
    # Bins have a sixty-fourth of the rows.
    assert np.mean(np.abs(predicted - truth) < 0.03) > 0.95


def test_trees_are_the_same_every_time_and_few_rows_have_none():
    generator = np.random.default_rng(6)
    facts, wanted = generator.uniform(size=(300, 4)), generator.normal(size=300)
    weights = generator.uniform(size=300)
    assert boost(facts, wanted, weights) == boost(facts, wanted, weights)
    assert all(isinstance(tree, float) for tree in boost(facts[:20], wanted[:20], weights[:20]))


def test_facts_count_turns_of_the_device():
    config = next(tile.config for tile in tiles_of(H200)["half"] if tile.config.kernel == "wgmma")
    config = replace(config, block_m=64, block_n=64, block_k=64, num_warps=4)
    facts = facts_of(replace(PROBLEM, n=64 * 200 - 32), config, 2, H200, is_plain=True)
    assert (facts.rows, facts.columns, facts.steps) == (1, 200, 64)
    assert (facts.turns, facts.waves) == (2, 1)
    assert (facts.fill, facts.last_turn, facts.last_wave) == pytest.approx((200 / 132, 68 / 132, 200 / 264))
    assert (facts.full_rows, facts.full_columns) == (48 / 64, (64 * 200 - 32) / (64 * 200))
    assert (facts.a_is_k, facts.b_is_k, facts.is_plain, facts.is_copied) == (1, 0, 1, 0)


@pytest.fixture(scope="module")
def slow_twos(tmp_path_factory):
    """A chip without corrections, and times on it: those of the model, but shared tiles take half as long again."""
    chip = replace(H200, num_sms=130)
    table = json.loads(json.dumps(table_for(H200)))
    for section in table["matmul"].values():
        section.pop("correction", None)
    install(chip.chip, table)
    generator = random.Random(9)
    lines: list[dict[str, Any]] = [{"device": {}, "target": asdict(chip)}]
    for _ in range(140):
        shape = MatmulShape(generator.randint(1, 64), 64 * generator.randint(8, 80), 64 * generator.randint(40, 160))
        us, programs = {}, {}
        for tile in tiles_of(chip)["half"]:
            for splits in (1, 2, 3):
                config = replace(tile.config, split_k=splits)
                if is_sensible(shape.problem, config, chip):
                    amounts = amounts_of(shape.problem, config, tile.occupancy, chip, is_plain=True)
                    us[config_text(config)] = MODEL.us(tile.costs, amounts) * (1.5 if splits > 1 else 1.0)
                    programs[config_text(config)] = tile.occupancy
        lines.append({"line": as_line(shape), "us": us, "bad": {}, "vendors": {}, "programs_per_sm": programs})
    path = tmp_path_factory.mktemp("measured") / "measured.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return chip, path


@pytest.mark.slow
def test_the_choice_learns_what_takes_longer_than_its_terms(slow_twos):
    chip, path = slow_twos
    said: list[str] = []
    measured = read([path], 4)[1]
    section = correct(measured, table_for(chip), said.append)["matmul"]["half"]
    assert {key: value for key, value in section.items() if key != "correction"} == table_for(chip)["matmul"]["half"]
    without, with_it = map(float, re.findall(r"\d\.\d{3}", said[0]))
    assert without > 1.05
    assert with_it < 1.01


def test_measurements_may_be_compressed(slow_twos, tmp_path):
    _, path = slow_twos
    compressed = tmp_path / "measured.jsonl.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert read([compressed], 0) == read([path], 0)


@pytest.mark.slow
def test_few_products_correct_nothing(slow_twos):
    chip, path = slow_twos
    measured = read([path], 0)[1][:99]
    section = correct(measured, table_for(chip), print)["matmul"]["half"]
    assert "correction" not in section


@pytest.mark.slow
def test_a_corrected_table_is_written_and_read_back(slow_twos, tmp_path, capsys):
    chip, path = slow_twos
    out = tmp_path / "table.json"
    assert main([str(path), "--correct", "--out", str(out)]) == 0
    assert "half: corrected by 112 shapes; 28 judged" in capsys.readouterr().out
    table = json.loads(out.read_text())
    assert as_text(table) == out.read_text()
    # A tree a line.
    assert sum(line.startswith("     [") for line in out.read_text().splitlines()) == 24
    assert correction_of(table["matmul"]["half"], Facts._fields)
    assert table["softmax"] == table_for(chip)["softmax"]


def test_predictions_near_the_fastest_are_corrected_and_explained():
    found = ranked(PROBLEM, H200)
    assert found == sorted(found, key=lambda each: each[0])
    assert found[0][1] == select(PROBLEM, H200)
    config = found[0][1]
    tile = next(tile for tile in tiles_of(H200)["half"] if tile.config == replace(config, split_k=1))
    sum_us = MODEL.us(tile.costs, amounts_of(PROBLEM, config, tile.occupancy, H200, is_plain=True))
    times = factor(tile.correction, facts_of(PROBLEM, config, tile.occupancy, H200, is_plain=True))
    assert found[0][0] == pytest.approx(sum_us * times)
    assert f"times {times:.2f}" in explain(PROBLEM, H200)
    # A device without corrections has the sums of its terms.
    assert ", times " not in explain(PROBLEM, KNOWN["amd_mi300x"])
