"""Imports go one way, and a gateway is light: what `pyproject.toml` and the design promise."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )


def test_import_contracts_hold() -> None:
    done = run_python("from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_command_that_tunes_alone_imports_the_tuner() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one.get("protected_modules") == ["tilewire.kernels.autotune"])
    assert contract["allowed_importers"] == ["tilewire.service.cli.tune"]


@pytest.mark.slow
def test_a_gateway_loads_no_torch_and_loads_quickly() -> None:
    # What loading takes of a core: how long others kept the core is not the gateway's.
    code = "import sys, time, tilewire.service.gateway.__main__; print(time.process_time(), *sorted(sys.modules))"
    spent_s = []
    for _ in range(3):
        done = run_python(code)
        assert done.returncode == 0, done.stderr
        spent, *modules = done.stdout.split()
        spent_s.append(float(spent))
        assert "tilewire.service.gateway.app" in modules
        assert not {"torch", "triton", "kernels", "pydantic_settings"} & set(modules)
    assert min(spent_s) < 1.5


def test_the_client_loads_no_server() -> None:
    code = "import sys, tilewire; print(sorted({'torch', 'fastapi', 'msgspec', 'pydantic', 'service'} & sys.modules.keys()))"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
