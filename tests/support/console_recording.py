"""Records what a busy server answers to the console's questions, a set of answers for each second.

    python -m tests.support.console_recording run.json.gz --device cuda:0

It needs no browser, so it runs where the GPU is; `console_picture` draws the page from the recording elsewhere. Nothing
in it is made up. Knows no page.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.live_server import ROOT, serving

PATHS = (
    "/metrics",
    "/v2/health/ready",
    "/v2",
    "/v1/tensors",
    "/v1/kernels",
    "/v1/history",
    "/v1/programs",
    "/openapi.json",
)
DEFAULT_S = 125

Answer = dict[str, Any]


@contextlib.contextmanager
def served_under_load(device: str, seconds: float) -> Iterator[str]:
    """A server on this device, and processes that keep it busy for a while."""
    profile, processes, pause_s = ("cpu", 1, 0.002) if device == "cpu" else ("gpu", 4, 0.0)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "log", "--device", device) as server:
        command = [sys.executable, "-m", "tests.support.console_load", server.url, "--profile", profile]
        command += ["--seconds", str(seconds), "--pause-s", str(pause_s)]
        with contextlib.ExitStack() as stack:
            for _ in range(processes):
                stack.enter_context(subprocess.Popen(command, cwd=ROOT))
            yield server.url


def record(path: Path, device: str, seconds: int) -> None:
    """Writes what a busy server answers, second by second."""
    frames: list[dict[str, Answer]] = []
    with (
        served_under_load(device, seconds + 5) as url,
        httpx.Client(base_url=url, timeout=30, trust_env=False, headers={"accept": "text/plain, */*"}) as client,
    ):
        began_s, began_at = time.monotonic(), time.time()
        for number in range(seconds):
            frames.append({path: _kept(client.get(path)) for path in PATHS})
            time.sleep(max(0.0, began_s + number + 1 - time.monotonic()))
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"began_at": began_at, "frames": frames}, file)
    print(f"{path}: {len(frames)} seconds on {device}")


def _kept(response: httpx.Response) -> Answer:
    headers = {"content-type": response.headers.get("content-type", "")}
    return {"status": response.status_code, "headers": headers, "body": response.text}


def main() -> None:
    """Records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", default="cpu", help="where it is served")
    parser.add_argument("--seconds", type=int, default=DEFAULT_S)
    arguments = parser.parse_args()
    record(arguments.path, arguments.device, arguments.seconds)


if __name__ == "__main__":
    main()
