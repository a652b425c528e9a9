"""The unit of systemd: systemd itself accepts it, and it gives the service the time and the exit statuses that it has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tilewire.service.cli.serve import EXIT_USAGE
from tilewire.service.config.settings import Settings

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "tilewire.service"
COMMAND = "/opt/tilewire/bin/tilewire"


def values_of(key: str) -> list[str]:
    lines = (line.partition("=") for line in UNIT.read_text(encoding="utf-8").splitlines())
    return [value for name, _, value in lines if name == key]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # It looks for the command, which is not installed here.
    text = UNIT.read_text(encoding="utf-8")
    assert text.count(COMMAND) == 1
    path = tmp_path / UNIT.name
    path.write_text(text.replace(COMMAND, "/bin/true"), encoding="utf-8")
    verified = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_a_drain_ends_within_the_time_that_the_unit_gives() -> None:
    (stop_s,) = values_of("TimeoutStopSec")
    # The margin that docs/operations.md asks of a supervisor.
    assert int(stop_s) >= Settings().drain_timeout_s + 15


def test_a_wrong_setting_is_not_tried_again() -> None:
    assert values_of("Restart") == ["on-failure"]
    assert values_of("RestartPreventExitStatus") == [str(EXIT_USAGE)]


def test_variables_of_the_unit_are_settings() -> None:
    names = {value.partition("=")[0].removeprefix("TILEWIRE_").lower() for value in values_of("Environment")}
    assert names - {"triton_cache_dir"} == {"log_format"} <= set(Settings.model_fields)
