"""NVIDIA's C++ load generator against a running server: no request fails, and it finds its figures in our statistics.

`perf_analyzer` comes with `pip install perf-analyzer` where the C library is glibc 2.38 or newer. Without one on the path that
runs, these tests skip themselves.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.support.exposition import scrape, total
from tests.support.live_server import LiveServer

# Short windows: nothing here is a measurement.
QUICK = [
    "--measurement-mode", "count_windows", "--measurement-request-count", "20", "--measurement-interval", "500",
    "--stability-percentage", "999", "--max-trials", "3",
]  # fmt: skip
ADD = ["-m", "add", "--shape", "a:64", "--shape", "b:64"]
MATMUL = ["-m", "matmul", "--shape", "a:16,32", "--shape", "b:32,8"]
SOFTMAX = ["-m", "softmax", "--shape", "x:8,64"]


@pytest.fixture(scope="module", autouse=True)
def _load_generator() -> None:
    """Skips before a server starts."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)


def why_not() -> str | None:
    """Why there is no load generator to run, or None."""
    found = shutil.which("perf_analyzer")
    if found is None:
        return "no perf_analyzer on the path"
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    return None if not shown.returncode else f"perf_analyzer does not run here: {shown.stderr.strip()[:200]}"


@pytest.mark.parametrize(
    "flags",
    [
        [*ADD, "--concurrency-range", "2"],
        [*MATMUL, "--concurrency-range", "1:3:2"],
        [*SOFTMAX, "--concurrency-range", "2", "--async"],
        [*ADD, "--request-rate-range", "40"],
        [*MATMUL, "--request-rate-range", "40", "--request-distribution", "poisson", "--async"],
    ],
    ids=" ".join,
)
def test_it_runs_without_an_error(server: LiveServer, flags: list[str], tmp_path: Path) -> None:
    run(server, flags, tmp_path / "report.csv")


@pytest.mark.parametrize(
    "flags",
    [
        [*ADD, "--concurrency-range", "2"],
        [*MATMUL, "--concurrency-range", "1:3:2", "--async"],
        [*SOFTMAX, "--request-rate-range", "40"],
    ],
    ids=" ".join,
)
def test_it_runs_over_shared_memory_without_an_error(
    shared_server: StartServer, flags: list[str], tmp_path: Path
) -> None:
    server = shared_server("--gateways", "2", "--arena-bytes", "32MiB", "--allow-shared-memory")
    shared = ["--shared-memory", "system", "--output-shared-memory-size", "65536"]
    run(server, [*flags, *shared], tmp_path / "report.csv")
    with server.client() as client:
        assert client.get("/v2/systemsharedmemory/status").json() == []
        assert total(scrape(client), "tilewire_rejected_total") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [*ADD, "--concurrency-range", "2"],
        [*MATMUL, "--concurrency-range", "1:3:2", "--async"],
        [*SOFTMAX, "--concurrency-range", "2", "--streaming", "--async"],
        [*MATMUL, "--concurrency-range", "2", "--shared-memory", "system", "--output-shared-memory-size", "65536"],
    ],
    ids=" ".join,
)
def test_it_runs_over_grpc_without_an_error(grpc_server: LiveServer, flags: list[str], tmp_path: Path) -> None:
    run(grpc_server, flags, tmp_path / "report.csv", protocol="grpc")


def run(server: LiveServer, flags: list[str], report: Path, protocol: str = "http") -> None:
    """A run that must end without an error and with figures."""
    address = server.url.removeprefix("http://") if protocol == "http" else server.grpc_address
    command = ["perf_analyzer", "-i", protocol, "-u", address, "-f", str(report), *QUICK, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stderr.lower(), done.stderr
    rows = list(csv.DictReader(report.read_text().splitlines()))
    assert rows
    for row in rows:
        assert float(row["Inferences/Second"]) > 0
        # What it takes from the server's statistics.
        assert float(row["Server Compute Infer"]) > 0
