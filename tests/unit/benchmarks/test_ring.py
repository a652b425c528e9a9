"""The ring of hosts and its simulation at a small size: what must hold for any seed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import bench_ring
from benchmarks.bench_ring import ROUND_ROBIN, Fleet, Scenario, simulate
from benchmarks.ring import Ring, hash_of

SMALL = Scenario(hosts=5, residents=200, requests=4_000, room=2.0, load_cost=5.0)
KEYS = [f"weights/{number}" for number in range(500)]


def phase_of(row: Any, name: str) -> Any:
    (phase,) = [phase for phase in row["phases"] if phase["phase"] == name]
    return phase


# ── ring ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("gone", [1, 4, 7])
def test_only_the_keys_of_a_host_that_goes_move(gone: int) -> None:
    ids = list(range(1, 8))
    left = [server_id for server_id in ids if server_id != gone]
    before, after = Ring(ids, 16, 0), Ring(left, 16, 0)
    owners = {key: ids[before.owner(hash_of(key))] for key in KEYS}
    moved = {key for key in KEYS if left[after.owner(hash_of(key))] != owners[key]}
    assert moved == {key for key in KEYS if owners[key] == gone}


def test_more_points_spread_keys_more_evenly() -> None:
    def spread(weight: int) -> float:
        ring = Ring(range(1, 21), weight, 0)
        counts = [0] * 20
        for number in range(20_000):
            counts[ring.owner(hash_of(f"key/{number}"))] += 1
        return max(counts) / (sum(counts) / len(counts))

    assert 1.0 < spread(64) < spread(16) < spread(1)
    assert spread(16) < 1.3


@settings(max_examples=50, deadline=None)
@given(
    under_way=st.lists(st.integers(0, 40), min_size=2, max_size=9),
    factor=st.sampled_from([101, 125, 150, 300]),
    key=st.text(max_size=20),
)
def test_a_host_is_chosen_only_under_its_limit(under_way: list[int], factor: int, key: str) -> None:
    ring = Ring(range(1, len(under_way) + 1), 4, factor)
    total = sum(under_way)
    start = ring.start(hash_of(key))
    chosen = ring.choose(start, under_way, total)
    limit = -(-(total + 1) * factor // 100) / len(under_way)
    assert under_way[chosen] < max(1, limit + 1)
    # Whoever is at less than the whole part of the limit is never passed over.
    if under_way[ring.owner(hash_of(key))] < int(limit):
        assert chosen == ring.owner(hash_of(key))


def test_without_a_limit_a_key_stays_with_its_host() -> None:
    ring = Ring(range(1, 6), 4, 0)
    for key in KEYS:
        assert ring.choose(ring.start(hash_of(key)), [1000] * 5, 5000) == ring.owner(hash_of(key))


# ── simulation ────────────────────────────────────────────────────────────────────────────────────


def test_the_same_seed_gives_the_same_row() -> None:
    assert simulate(SMALL) == simulate(SMALL)
    assert simulate(SMALL) != simulate(replace(SMALL, seed=2))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_ring_hits_where_turns_do_not(seed: int) -> None:
    scenario = replace(SMALL, seed=seed, room=1.5)
    ring = phase_of(simulate(scenario), "steady")["hit_rate"]
    turns = phase_of(simulate(replace(scenario, policy=ROUND_ROBIN)), "steady")["hit_rate"]
    assert ring > 0.9
    assert turns < 0.8


@pytest.mark.parametrize("factor", [125, 150, 200])
def test_requests_under_way_keep_to_the_limit(factor: int) -> None:
    scenario = replace(SMALL, balance_factor=factor, hosts=4, clients_per_host=10)
    fleet = Fleet(scenario)
    unlimited = Fleet(replace(scenario, balance_factor=0))
    spread = fleet.run("steady").row(4, scenario.residents)["max_over_mean"]
    assert isinstance(spread, float)
    assert spread < float(unlimited.run("steady").row(4, scenario.residents)["max_over_mean"])


def test_a_host_that_goes_costs_what_it_held() -> None:
    # Without a limit and with room for every resident on each host, only the residents of the host that went are loaded.
    scenario = replace(SMALL, balance_factor=0, room=float(SMALL.hosts))
    row = simulate(scenario)
    assert phase_of(row, "steady")["hit_rate"] == 1.0
    assert phase_of(row, "steady")["loaded_share"] == 0.0
    rehomed = row["rehomed_share"]
    assert isinstance(rehomed, float)
    assert 0.05 < rehomed < 0.4
    assert 0 < phase_of(row, "gone")["loaded_share"] <= rehomed
    assert 0 < phase_of(row, "back")["loaded_share"] <= rehomed


def test_room_is_never_exceeded() -> None:
    scenario = replace(SMALL, room=1.25)
    fleet = Fleet(scenario)
    fleet.run("steady")
    assert fleet.copies() <= 1.25 * scenario.residents
    row = simulate(scenario)
    assert row["copies"] == pytest.approx(1.25, abs=0.05)


def test_hosts_that_keep_what_they_have_hit_the_most_popular_ones() -> None:
    # By turns every host keeps the same residents: the hit rate is their share of the popularity.
    scenario = replace(SMALL, policy=ROUND_ROBIN, forgets=False, room=1.5)
    kept = round(scenario.room * scenario.residents / scenario.hosts)
    popularity = [1 / rank for rank in range(1, scenario.residents + 1)]
    steady = phase_of(simulate(scenario), "steady")
    assert steady["hit_rate"] == pytest.approx(sum(popularity[:kept]) / sum(popularity), abs=0.02)
    assert simulate(scenario)["copies"] == kept * scenario.hosts / scenario.residents


def test_more_room_gives_more_hits() -> None:
    rates = [phase_of(simulate(replace(SMALL, room=room)), "steady")["hit_rate"] for room in (1.1, 2.0, 4.0)]
    assert rates == sorted(rates)


# ── command ───────────────────────────────────────────────────────────────────────────────────────


def test_the_result_holds_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenarios = [SMALL, replace(SMALL, policy=ROUND_ROBIN)]
    assert bench_ring.run_scenarios(scenarios, ["--out", "x"], tmp_path) == 0
    result = json.loads((tmp_path / "ring.json").read_text())
    assert [row["policy"] for row in result["rows"]] == ["ring", "round robin"]
    assert all([phase["phase"] for phase in row["phases"]] == ["steady", "gone", "back"] for row in result["rows"])
    assert capsys.readouterr().out.count("| steady |") == 2


def test_the_committed_rows_are_of_the_sizes_asked_for() -> None:
    sizes = {(scenario.hosts, scenario.residents) for scenario in bench_ring.scenarios(300_000)}
    assert sizes == {(1000, 100_000), (100, 10_000), (10, 1_000)}
