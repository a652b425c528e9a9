"""`tilewire bench`: what a person sees who asks for what is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.live_server import path_with
from tilewire.service.cli.app import BENCHMARKS, app


def test_an_unknown_benchmark_names_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["bench", "nonsense"])
    assert result.exit_code == 2
    assert all(name in result.output for name in BENCHMARKS)


def test_every_benchmark_explains_its_arguments() -> None:
    for name in BENCHMARKS:
        result = CliRunner().invoke(app, ["bench", name, "--out", "x", "--no-such-flag"])
        assert result.exit_code == 2
        assert "no-such-flag" in result.output


@pytest.mark.slow
def test_a_benchmark_runs_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('the folder was imported')\n")
    (tmp_path / "benchmarks.py").write_text("raise RuntimeError('the folder was imported')\n")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tilewire", "bench", "client", "--elements", "8"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path_with(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["client_us"] > 0
