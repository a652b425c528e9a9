"""`tilewire bench`: what a person sees who asks for what is not there."""

from __future__ import annotations

from typer.testing import CliRunner

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
