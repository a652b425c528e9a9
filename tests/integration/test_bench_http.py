"""The HTTP benchmark at a small scale: every server answers right and every row is there. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import bench_http
from benchmarks.contenders import BODY_ONLY, LITSERVE, RAW, TILEWIRE, TWENTY_LINES
from benchmarks.load import find_wrk

SMALL = ["--size", "128", "--seconds", "1", "--warm-up", "0", "--litserve", "1", "--device", "cpu"]
MEMORY = ["--ingest-bytes", str(2**22), "--arena-bytes", str(2**26)]


@pytest.mark.skipif(find_wrk() is None, reason="wrk is not installed")
def test_a_small_round(tmp_path: Path) -> None:
    assert bench_http.run([*SMALL, *MEMORY, "--out", str(tmp_path), "--", "--gateways", "2"]) == 0
    result = json.loads((tmp_path / "bench_http.json").read_text())
    servers = {RAW, BODY_ONLY, TWENTY_LINES, TILEWIRE}
    if importlib.util.find_spec("litserve") is not None:
        servers.add(LITSERVE)
    expected = {(question.name, server) for question in bench_http.QUESTIONS for server in servers}
    assert {(row["question"], row["server"]) for row in result["rows"]} == expected
    assert all(row["requests"] > 0 and row["per_s"] > 0 and row["p50_us"] > 0 for row in result["rows"])
    assert {one["server"] for one in result["ingest"]} == {RAW, BODY_ONLY, TILEWIRE}
    assert all(one["gb_per_s"] > 0 for one in result["ingest"])
    assert {one["against"] for one in result["ratios"]} >= servers - {TILEWIRE}
    assert result["backend"] == "cpu"
    assert str(tmp_path) not in result["command"]
