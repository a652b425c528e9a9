"""What a result was measured on: device, driver, processor, versions, date and command. Knows no question."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.command import command_of
from benchmarks.load import find_wrk
from tilewire._version import __version__

PACKAGES = ("fastapi", "uvicorn", "httptools", "uvloop", "litserve", "numpy")


def describe(identity: Mapping[str, Any], module: str, argv: Sequence[str]) -> dict[str, object]:
    """What every result says of itself.

    Args:
        identity: What `GET /v2` of the server said; empty when it did not start.
        module: Of the benchmark.
        argv: Its arguments.
    """
    engine: Mapping[str, str] = next(iter(identity.get("engines", [])), {})
    return {
        "device": engine.get("device_name", ""),
        "backend": engine.get("backend", ""),
        "driver": "" if engine.get("backend") == "cpu" else driver(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {
            "tilewire": __version__,
            "python": platform.python_version(),
            "torch": engine.get("torch", ""),
            "triton": engine.get("triton", ""),
            **{name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)},
            "wrk": wrk_version(),
        },
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": command_of(module, argv),
    }


def driver() -> str:
    """The GPU driver's version, or nothing where no tool tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0].strip()


def processor() -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def wrk_version() -> str:
    """What the load generator calls itself."""
    wrk = find_wrk()
    if wrk is None:
        return ""
    said = subprocess.run([wrk, "-v"], capture_output=True, text=True, check=False)
    return (said.stdout + said.stderr).partition(" [")[0].removeprefix("wrk ").strip()
