"""Fitting a device's table: what is measured is made by the model itself, so what must be found is known."""

import json
import math
import random
from dataclasses import asdict, replace
from typing import Any

import pytest

from tilewire.kernels.autotune.collect import tuning_of
from tilewire.kernels.autotune.fitting import fit, read
from tilewire.kernels.autotune.workloads import as_line
from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.matmul.members import MODEL, is_sensible, tiles_of
from tilewire.kernels.matmul.select import amounts_of
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.op import config_text
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.selection.cost_model import tile_of
from tilewire.kernels.selection.tables import install, table_for

H200 = KNOWN["nvidia_h200"]
# A tile that nothing else comes near for rows just above 128, and one that is never the best.
WANTED = Config("wgmma", 152, 128, 64, num_warps=8, num_stages=5, is_persistent=True, is_swapped=True)


@pytest.fixture(scope="module")
def target():
    """A chip whose table lacks a tile of the H200's."""
    chip = replace(H200, num_sms=131)
    table = json.loads(json.dumps(table_for(H200)))
    half = table["matmul"]["half"]
    half["tiles"] = [each for each in half["tiles"] if each["block_m"] != WANTED.block_m]
    install(chip.chip, table)
    return chip


@pytest.fixture(scope="module")
def measured(target, tmp_path_factory):
    """Times of every tile of the H200 for products of 137 to 152 rows and others, as the model has them."""
    tiles = {tile.config: tile for tile in tiles_of(H200)["half"]}
    assert WANTED in tiles
    generator = random.Random(7)
    lines: list[dict[str, Any]] = [{"device": {}, "target": asdict(target)}]
    for _ in range(24):
        rows = generator.choice([16, 64, generator.randint(137, 152), generator.randint(137, 152), 512])
        shape = MatmulShape(rows, 128 * generator.randint(60, 131), 64 * generator.randint(40, 128))
        us = {}
        for config, tile in tiles.items():
            if is_sensible(shape.problem, config, target):
                amounts = amounts_of(shape.problem, config, tile.occupancy, target, is_plain=True)
                us[config_text(config)] = MODEL.us(tile.costs, amounts)
        lines.append(
            {"line": as_line(shape), "us": us, "bad": {}, "vendors": {}, "programs_per_sm": dict.fromkeys(us, 1)}
        )
    path = tmp_path_factory.mktemp("measured") / "measured.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read([path], 0)[1]


def entries_of(section):
    """Entries of a section of a table, by configuration."""
    return {tile_of(Config, MODEL, entry, {}).config: entry for entry in section["tiles"]}


@pytest.mark.slow
def test_a_table_keeps_its_tiles_and_is_joined_by_the_one_that_wins(target, measured):
    section = fit(measured, target, lambda _: None, more=3)["matmul"]["half"]
    fitted, old = entries_of(section), entries_of(table_for(target)["matmul"]["half"])
    assert set(fitted) - set(old) == {WANTED}
    assert set(old) <= set(fitted)
    assert all(fitted[config].get("all_layouts") == each.get("all_layouts") for config, each in old.items())
    assert "all_layouts" not in fitted[WANTED]
    # No shape had an epilogue, so no fit can know its cost.
    assert all(fitted[config]["costs"]["epilogue"] == each["costs"]["epilogue"] for config, each in old.items())
    # Its costs predict its times.
    costs = MODEL.costs(fitted[WANTED]["costs"], {})
    for each in measured:
        if (us := each.us.get(WANTED)) is not None:
            amounts = amounts_of(each.shape.problem, WANTED, 1, target, is_plain=True)
            assert MODEL.us(costs, amounts) == pytest.approx(us, rel=0.1)


@pytest.mark.slow
def test_a_slow_tile_is_not_believed_to_be_fast(target, measured):
    """Times far from the best count little, but not where the costs of all make a tile look fast."""
    slow = min(measured[0].us, key=measured[0].us.__getitem__)
    rare = [each for each in measured if slow in each.us][:4]
    worse = [
        replace(each, us={config: us * (5 if config == slow else 1) for config, us in each.us.items()})
        if each in rare
        else replace(each, us={config: us for config, us in each.us.items() if config != slow})
        for each in measured
    ]
    section = fit(worse, target, lambda _: None, more=0)["matmul"]["half"]
    costs = {config: MODEL.costs(entry["costs"], {}) for config, entry in entries_of(section).items()}
    for each in worse:
        predicted = {
            config: MODEL.us(costs[config], amounts_of(each.shape.problem, config, 1, target, is_plain=True))
            for config in each.us
            if config in costs
        }
        assert min(predicted, key=predicted.__getitem__) != slow


def test_a_fit_finds_the_tiles_that_are_fastest(target, measured):
    section = fit(measured, target, lambda _: None)["matmul"]["half"]
    names = ("kernel", "block_m", "block_n", "block_k")
    kept = {tuple(each[name] for name in names) for each in section["tiles"]}
    assert tuple(getattr(WANTED, name) for name in names) in kept
    assert len(section["tiles"]) <= sum(tuning_of(measured[0].shape).sizes("half")[:2])


def test_binaries_of_a_tile_may_have_other_numbers_of_programs(target, tmp_path):
    config = Config("fma", 64, 64, 32, num_warps=4, num_stages=2)
    lines: list[dict[str, Any]] = [{"device": {}, "target": asdict(target)}]
    for number in range(12):
        layout = "kn" if number % 3 == 0 else "mn"
        shape = MatmulShape(256 + 64 * number, 512, 1024, dtype="float32", a_major=layout[0], b_major=layout[1])
        key = config_text(config)
        lines.append(
            {
                "line": as_line(shape),
                "us": {key: 20.0 + number},
                "bad": {},
                "vendors": {},
                "programs_per_sm": {key: 2 if layout == "kn" else 3},
            }
        )
    path = tmp_path / "measured.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = fit(read([path], 0)[1], target, lambda _: None)["matmul"]["ieee"]
    entry = next(each for each in section["tiles"] if each["kernel"] == "fma")
    assert (entry["occupancy"], entry["occupancies"]) == (3, {"kn vec16": 2})
    tile = tile_of(Config, MODEL, entry, {})
    assert [tile.in_binary(name).occupancy for name in ("mn vec16", "kn vec16", "kk scalar")] == [3, 2, 3]


@pytest.mark.slow
def test_costs_of_a_kept_table_move_little(target, measured):
    old = table_for(target)["matmul"]["half"]
    term = "load"
    wanted = {tile_of(Config, MODEL, each, {}).config: each["costs"][term] for each in old["tiles"]}

    def moved(more):
        """How far the costs of a term are from the table's, as logarithms: the mean."""
        tiles = fit(measured, target, lambda _: None, more=more)["matmul"]["half"]["tiles"]
        fitted = {tile_of(Config, MODEL, each, {}).config: each["costs"][term] for each in tiles}
        found = [abs(math.log(fitted[config] / cost)) for config, cost in wanted.items() if config in fitted]
        assert len(found) > 4
        return sum(found) / len(found)

    assert moved(0) < 0.15 < moved(None)


def test_the_cost_of_an_epilogue_is_fitted_by_itself(target, tmp_path):
    tiles = {tile.config: tile for tile in tiles_of(target)["half"]}
    place = [term.name for term in MODEL.terms].index("epilogue")
    wanted = {config: 2.5 if config.kernel == "tma" else 0.6 for config in tiles}
    generator = random.Random(8)
    lines: list[dict[str, Any]] = [{"device": {}, "target": asdict(target)}]
    for _ in range(48):
        m, n, k = (64 * generator.randint(8, 64) for _ in range(3))
        shape = MatmulShape(m, n, k, activation="gelu")
        us = {}
        for config, tile in tiles.items():
            if is_sensible(shape.problem, config, target):
                amounts = amounts_of(shape.problem, config, tile.occupancy, target, is_plain=False)
                costs = (*tile.costs[:place], wanted[config], *tile.costs[place + 1 :])
                us[config_text(config)] = MODEL.us(costs, amounts)
        programs = {config_text(config): tile.occupancy for config, tile in tiles.items()}
        lines.append({"line": as_line(shape), "us": us, "bad": {}, "vendors": {}, "programs_per_sm": programs})
    path = tmp_path / "measured.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured = read([path], 0)[1]
    section = fit(measured, target, lambda _: None, more=0, only=["epilogue"])["matmul"]["half"]
    old = table_for(target)["matmul"]["half"]
    assert section["costs"] == old["costs"]
    checked = set()
    for fitted, each in zip(section["tiles"], old["tiles"], strict=True):
        assert {**fitted, "costs": {**fitted["costs"], "epilogue": 0}} == {
            **each,
            "costs": {**each["costs"], "epilogue": 0},
        }
        config = tile_of(Config, MODEL, each, {}).config
        # Slow tiles count little, and all are drawn to what they have in common.
        if sum(found.us.get(config, float("inf")) < 1.3 * found.best_us for found in measured) > 4:
            assert fitted["costs"]["epilogue"] == pytest.approx(wanted[config], rel=0.35), config
            checked.add(config.kernel)
    assert checked == {"tma", "wgmma"}
