"""The HTTP benchmarks at a small scale: every server answers right and every row is there. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks import bench_http, bench_settings
from benchmarks.contenders import (
    BODY_ONLY,
    LITSERVE,
    RAW,
    TILEWIRE,
    TWENTY_LINES,
    Contender,
    Failure,
    running_command,
)

SIZE = 128
SMALL = ["--size", str(SIZE), "--seconds", "1", "--warm-up", "0", "--device", "cpu", "--arena-bytes", str(2**26)]
OTHERS = ["--litserve", "1", "--ingest-bytes", str(2**22)]

pytestmark = pytest.mark.slow


@pytest.mark.alone
@pytest.mark.usefixtures("wrk")
def test_a_small_round(tmp_path: Path) -> None:
    assert bench_http.run([*SMALL, *OTHERS, "--out", str(tmp_path), "--", "--gateways", "2"]) == 0
    result = json.loads((tmp_path / "bench_http.json").read_text())
    servers = {RAW, BODY_ONLY, TWENTY_LINES, TILEWIRE}
    if importlib.util.find_spec("litserve") is not None:
        servers.add(LITSERVE)
    expected = {(question.name(SIZE), server) for question in bench_http.QUESTIONS for server in servers}
    assert {(row["question"], row["server"]) for row in result["rows"]} == expected
    # The twenty lines may take longer than this second for one question, on a busy machine.
    for server in servers:
        rows = [row for row in result["rows"] if row["server"] == server]
        answered = [row for row in rows if row["requests"] > 0 and row["per_s"] > 0 and row["p50_us"] > 0]
        assert len(answered) >= (1 if server == TWENTY_LINES else len(rows)), rows
    assert {one["server"] for one in result["ingest"]} == {RAW, BODY_ONLY, TILEWIRE}
    assert all(one["gb_per_s"] > 0 for one in result["ingest"])
    assert {one["against"] for one in result["ratios"]} >= servers - {TILEWIRE}
    assert result["backend"] == "cpu"
    assert result["failures"] == []
    assert all(result["versions"][name] for name in ("tilewire", "python", "torch", "wrk"))
    assert str(tmp_path) not in result["command"]


def test_the_loads_are_those_that_were_asked_for() -> None:
    assert [question.name(4096) for question in bench_http.QUESTIONS] == [
        "8 KiB bodies, 64 connections",
        "8 KiB bodies, 256 connections",
        "128 KiB bodies, 64 connections",
        "32 MiB in and out, 4 connections",
        "8 KiB bodies, one connection",
    ]


@pytest.mark.usefixtures("wrk")
def test_a_server_that_fails_costs_only_its_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    weight = bench_http.weight_of(SIZE)
    failures: list[Failure] = []
    broken = Contender("broken", "", partial(running_command, ["benchmarks.no_such_server"], {}), "/", is_never)
    assert bench_http.measure(broken, weight, 1, 0, failures) == []
    assert [(failure.server, failure.question) for failure in failures] == [("broken", "")]
    # It answers, but wrong: there is nothing to measure.
    lost = Contender("lost", "", partial(running_command, ["benchmarks.raw_socket"], {}), "/sink", is_never)
    assert bench_http.measure(lost, weight, 1, 0, failures) == []
    assert failures[-1].error.startswith("WrongAnswer")
    bench_http.report([], bench_http.compare([], SIZE), SIZE)
    assert "not measured" in capsys.readouterr().out


def is_never(*_answer: object) -> bool:
    return False


@pytest.mark.usefixtures("wrk")
def test_a_small_round_of_settings(tmp_path: Path) -> None:
    only = ["as it is", "malloc: one arena", "huge pages"]
    assert bench_settings.run([*SMALL, "--gateways", "1", "--only", *only, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "bench_settings.json").read_text())
    expected = {(name, question.name(SIZE)) for name in only for question in bench_http.QUESTIONS}
    assert {(row["variant"], row["question"]) for row in result["rows"]} == expected


def test_cores_are_given_to_every_process() -> None:
    assert bench_settings.core_each(2, [4, 5, 6, 7]) == [[4], [5], [6]]
    assert bench_settings.engine_alone(2, [4, 5, 6, 7]) == [[4], [5, 6, 7], [5, 6, 7]]
