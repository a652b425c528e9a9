"""`tilewire precompile`: what it refuses, before anything is compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tilewire.service.cli import precompile as precompiling
from tilewire.service.cli.app import app
from tilewire.service.cli.serve import EXIT_USAGE

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "before"))
    return tmp_path


def test_an_unknown_target_is_named_with_those_that_there_are() -> None:
    done = CliRunner().invoke(app, ["precompile", "--target", "cuda:12"])
    assert done.exit_code == EXIT_USAGE
    assert "'cuda:12' is not one of cuda:80" in done.output


def test_a_good_target_beside_a_bad_one_compiles_nothing(cache: Path) -> None:
    with pytest.raises(ValueError, match="gfx1"):
        precompiling.run(["cuda:90", "hip:gfx1"], cache / "kernels", 1, Console(quiet=True))
    assert not (cache / "kernels").exists()
    assert os.environ["TRITON_CACHE_DIR"] == str(cache / "kernels")


def test_a_cache_that_is_a_file_is_named(cache: Path) -> None:
    (cache / "file").touch()
    done = CliRunner().invoke(app, ["precompile", "--target", "cuda:90", "--cache", str(cache / "file")])
    assert done.exit_code == EXIT_USAGE
    assert "is not a folder" in done.output


def test_no_target_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["precompile"]).exit_code == EXIT_USAGE
