"""`tilewire bench grpc` at a small scale: every row is there and right. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_grpc
from tests.support.programs import find_program

pytestmark = pytest.mark.slow


def test_a_small_round(tmp_path: Path) -> None:
    find_program("wrk")
    small = ["--seconds", "0.5", "--rounds", "2", "--in-flight", "4", "--out", str(tmp_path / "new")]
    serve = ["--device", "cpu", "--gateways", "1", "--arena-bytes", "64MiB"]
    assert bench_grpc.run([*small, "--", *serve]) == 0
    result = json.loads((tmp_path / "new" / "grpc.json").read_text())
    servers = [bench_grpc.ECHO, bench_grpc.FLOOR, bench_grpc.GRPC, bench_grpc.HTTP]
    assert [one["server"] for one in result["rounds"]] == servers * 2
    assert [one["server"] for one in result["medians"]] == servers
    assert all(
        one["per_s"] > 0 and 0 < one["p50_us"] <= one["p99_us"] and one["cpu_us"] > 0 for one in result["rounds"]
    )
    wanted = {"grpc_to_echo", "floor_to_echo", "cpu_grpc_to_echo", "http_to_grpc", "cpu_grpc_to_http"}
    assert set(result["ratios"]) == wanted
    assert str(tmp_path) not in result["command"]
