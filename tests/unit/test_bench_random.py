"""The benchmark over random shapes: what it makes of measurements."""

from __future__ import annotations

import json
from pathlib import Path


def test_ratios_are_by_group_and_beside_the_fastest_of_the_others(tmp_path: Path) -> None:
    from benchmarks.bench_random import group_names, report, rows_of, write

    groups = group_names(3, 0.02, ["matmul", "softmax"])
    lines = list(groups)
    entries = [
        {
            "line": line,
            "shape": json.loads(line),
            "own": "a",
            "us": {"a": 10.0, "b": 8.0},
            "vendors": {"x": 12.0, "y": 11.0},
        }
        for line in lines
    ]
    # Where nobody else computes the shape, and where dispatch's choice failed.
    entries[0]["vendors"] = {}
    entries[1]["us"] = {"b": 1.0}
    rows = rows_of([{"device": {}}, {"begun": "x"}, *entries], groups)
    assert len(rows) == len(lines) - 1
    assert "other_us" not in rows[0]
    assert {row["other_us"] for row in rows[1:]} == {11.0}
    shown = report(rows)
    assert "1.100   1.10" in shown
    assert "1.250" in shown
    write(tmp_path, rows, {"device": {}}, 3)
    assert json.loads((tmp_path / "random.json").read_text())["seed"] == 3
    assert "<svg" in (tmp_path / "random.svg").read_text()


def test_choices_of_online_tuning_stand_beside_the_predicted_ones() -> None:
    from benchmarks.bench_random import report, rows_of
    from tilewire.kernels.matmul.configs import VENDOR
    from tilewire.kernels.op import config_text

    entry = {"shape": {}, "own": "a", "us": {"a": 10.0, "b": 8.0}, "vendors": {"torch": 4.0, "y": 5.0}}
    online = [{"triton": "b", "fastest": config_text(VENDOR)}, {"triton": "a", "fastest": "was not measured"}]
    rows = rows_of([entry | {"line": str(number), "online": each} for number, each in enumerate(online)], {})
    assert [row["online_triton_us"] for row in rows] == [8.0, 10.0]
    assert [row["online_fastest_us"] for row in rows] == [4.0, 10.0]
    head, line = report(rows).splitlines()
    assert head.split() == [
        *("group", "shapes", "geomean", "least", "triton", "geomean", "least", "fastest", "geomean", "least"),
        *("of", "our", "fastest"),
    ]
    assert line.split() == ["?", "2", "0.400", "0.40", "0.447", "0.40", "0.632", "0.40", "1.250"]
