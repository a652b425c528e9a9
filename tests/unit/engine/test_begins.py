"""How an engine process begins: what libgomp reads of the environment before torch is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "turns"),
    [({}, 1000), ({"GOMP_SPINCOUNT": "77"}, 77), ({"OMP_WAIT_POLICY": "PASSIVE"}, 0)],
)
def test_threads_soon_sleep_when_they_wait_for_each_other(given: dict[str, str], turns: int) -> None:
    """libgomp writes what it has read."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    said = subprocess.run(
        [sys.executable, "-c", "import tilewire.service.engine.__main__"],
        env={**inherited, **given, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert f"GOMP_SPINCOUNT = '{turns}'" in said
