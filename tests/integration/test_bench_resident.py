"""The benchmark of results that stay at a small scale: every row is there, and answers are right. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_resident

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("wrk")
def test_a_small_round(tmp_path: Path) -> None:
    small = ["--items", "5000", "--width", "32", "--sizes", "64", "--seconds", "1", "--out", str(tmp_path)]
    assert bench_resident.run([*small, "--", "--device", "cpu", "--gateways", "1", "--arena-bytes", str(2**26)]) == 0
    result = json.loads((tmp_path / "resident.json").read_text())
    assert result["failures"] == []
    assert result["backend"] == "cpu"
    assert {"search, Tilewire", "search, 20 lines", "store", "program"} <= result["rows"].keys()
    for name in ("search, Tilewire", "search, 20 lines"):
        assert result["rows"][name]["per_s"] > 0
    assert result["rows"]["search, Tilewire"]["recall"] == 1
    assert [row["size"] for row in result["rows"]["store"]] == [64]
    assert result["rows"]["program"]["program_per_s"] > 0


def test_the_right_items_are_the_best_products(tmp_path: Path) -> None:
    items, query = bench_resident.make_items(100, 8, tmp_path / "items.safetensors")
    right = bench_resident.best_of(items, query)
    scores = items.astype("float32") @ query.astype("float32")[0]
    assert sorted(right) == sorted(scores.argsort()[::-1][: bench_resident.K].tolist())
