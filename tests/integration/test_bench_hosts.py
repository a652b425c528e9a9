"""`tilewire bench hosts` at a small scale: every row is there and right. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_hosts
from tests.support.programs import find_program

pytestmark = pytest.mark.slow


def test_a_small_round(tmp_path: Path) -> None:
    find_program("haproxy")
    small = ["--weights", "12", "--size", "32", "--clients", "2", "--requests", "600", "--room", "1.2"]
    assert bench_hosts.run(["--hosts", "2", *small, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "hosts.json").read_text())
    ring, turns = result["rows"]
    assert [ring["policy"], turns["policy"]] == ["ring", "round robin"]
    for row in (ring, turns):
        assert row["requests"] == 600
        assert row["wrong"] == row["failures"] == 0
        assert 0 < row["hit_rate"] <= 1
        assert row["per_s"] > 0
        # Room for 7 of 12 weights on each host; by the ring each is the home of 6.
        assert max(row["residents"]) <= 7
    # By the ring every weight is somewhere; by turns each host has the same seven.
    assert sum(ring["residents"]) >= 12
    assert turns["residents"] == [7, 7]
    assert ring["hit_rate"] > turns["hit_rate"]
    assert str(tmp_path) not in result["command"]


def test_a_small_round_with_a_store(tmp_path: Path) -> None:
    find_program("haproxy")
    small = ["--weights", "12", "--size", "32", "--clients", "2", "--requests", "200", "--room", "1.2"]
    assert bench_hosts.run(["--hosts", "2", "--store", *small, "--out", str(tmp_path)]) == 0
    for row in json.loads((tmp_path / "hosts_store.json").read_text())["rows"]:
        assert row["has_store"]
        assert row["requests"] == 200
        assert row["wrong"] == row["failures"] == 0
        assert 0 < row["hit_rate"] <= 1
        assert max(row["residents"]) <= 7
