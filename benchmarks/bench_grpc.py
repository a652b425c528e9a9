"""What the gRPC door costs: beside a plain grpc.aio server that echoes, and beside our own HTTP, in one run on one machine.

    python -m benchmarks.bench_grpc --out benchmarks/results -- --gateways 1

Owns the questions, the ratios and the report; `grpc_echo` is the plain server, `grpc_load` and `load` send. All answer the same
tensors; Tilewire computes their softmax on its engine. The servers are measured by turns, and the median round counts. Server,
load generator and engine are on one machine.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.contenders import ROOT, running_command
from benchmarks.grpc_load import COLUMNS
from benchmarks.load import Call, find_wrk, run_load
from benchmarks.machine import describe
from tilewire.service.cli.launch import running_server

ECHO, GRPC, HTTP = "grpc.aio echo", "Tilewire gRPC", "Tilewire HTTP"
TARGET, TARGET_PER_S = 0.8, 2500


@dataclass(frozen=True)
class Round:
    """One server under load for some seconds.

    Attributes:
        server: Name of the server.
        per_s: Answers per second.
        p50_us: Half of the latencies are below.
        p99_us: All but a hundredth are below.
    """

    server: str
    per_s: float
    p50_us: float
    p99_us: float


def free_port() -> int:
    """A port of the loopback that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def measure_grpc(server: str, address: str, arguments: argparse.Namespace) -> Round:
    """A round of gRPC calls from a process of their own.

    Raises:
        RuntimeError: A call failed.
    """
    words = ["--rows", arguments.rows, "--in-flight", arguments.in_flight, "--seconds", arguments.seconds]
    command = [sys.executable, "-m", "benchmarks.grpc_load", address, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{server}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    return Round(server, round(found["requests"] / found["seconds"]), found["p50_us"], found["p99_us"])


def measure_http(url: str, arguments: argparse.Namespace) -> Round:
    """A round of requests with the same tensor over HTTP, as npy.

    Raises:
        RuntimeError: The load generator failed, or saw an error.
    """
    body = Path(arguments.folder, "x.npy")
    np.save(body, np.linspace(0, 1, arguments.rows * COLUMNS, dtype=np.float32).reshape(arguments.rows, COLUMNS))
    call = Call("/v1/softmax", "application/x-npy", body.read_bytes())
    httpx.post(url + call.path, content=call.body, headers={"content-type": call.content_type}).raise_for_status()
    found = run_load(url, [call], connections=arguments.in_flight, seconds=math.ceil(arguments.seconds), threads=1)
    return Round(HTTP, round(found.per_s), found.p50_us, found.p99_us)


def run(argv: Sequence[str]) -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(prog="bench_grpc", description=__doc__)
    parser.add_argument("--rows", type=int, default=4, help="of 2 KiB each")
    parser.add_argument("--in-flight", type=int, default=16, help="requests at once")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for grpc.json")
    parser.add_argument("serve", nargs="*", help="flags of tilewire serve, behind --")
    arguments = parser.parse_args(argv)
    rounds: list[Round] = []
    with ExitStack() as stack:
        arguments.folder = stack.enter_context(tempfile.TemporaryDirectory())
        echo = stack.enter_context(running_command(["benchmarks.grpc_echo"], {})).removeprefix("http://")
        port = free_port()
        url = stack.enter_context(running_server("--grpc-port", str(port), *arguments.serve))
        identity = httpx.get(f"{url}/v2").json()
        for _ in range(arguments.rounds):
            rounds.append(measure_grpc(ECHO, echo, arguments))
            rounds.append(measure_grpc(GRPC, f"127.0.0.1:{port}", arguments))
            if find_wrk() is not None:
                rounds.append(measure_http(url, arguments))
    medians = {name: median_of(name, rounds) for name in dict.fromkeys(one.server for one in rounds)}
    ratios = report(medians, arguments.rows * 4 * COLUMNS)
    if arguments.out is not None:
        found = {
            **describe(identity, "benchmarks.bench_grpc", argv),
            "rounds": [asdict(one) for one in rounds],
            "medians": [asdict(one) for one in medians.values()],
            "ratios": ratios,
        }
        (arguments.out / "grpc.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def median_of(server: str, rounds: Sequence[Round]) -> Round:
    """The middle of a server's rounds, measure by measure."""
    mine = [one for one in rounds if one.server == server]
    return Round(
        server, *(statistics.median(getattr(one, name) for one in mine) for name in ("per_s", "p50_us", "p99_us"))
    )


def report(medians: dict[str, Round], nbytes: int) -> dict[str, float]:
    """Prints the medians and returns their ratios."""
    print(f"{nbytes} bytes in and out\n{'server':>14} {'req/s':>8} {'p50 µs':>8} {'p99 µs':>8}")
    for one in medians.values():
        print(f"{one.server:>14} {one.per_s:>8.0f} {one.p50_us:>8.0f} {one.p99_us:>8.0f}")
    grpc = medians[GRPC].per_s
    ratios = {"grpc_to_echo": round(grpc / medians[ECHO].per_s, 2)}
    print(f"gRPC to echo: {ratios['grpc_to_echo']} (wanted {TARGET}, and {TARGET_PER_S} requests/s)")
    if HTTP in medians:
        ratios["http_to_grpc"] = round(medians[HTTP].per_s / grpc, 1)
        print(f"HTTP to gRPC: {ratios['http_to_grpc']}")
    return ratios


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
