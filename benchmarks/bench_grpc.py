"""What the gRPC door costs: beside a plain grpc.aio server that echoes, and beside our own HTTP, in one run on one machine.

    python -m benchmarks.bench_grpc --out benchmarks/results -- --gateways 1

Owns the questions, the ratios and the report; `grpc_echo` is the plain server, `grpc_floor` what the library leaves at best.
`grpc_load` and `load` send. All answer the same tensors; Tilewire computes their softmax on its engine. The servers are
measured by turns in short rounds, and medians count: of each measure, and of the ratios within a round. Server, load generator
and engine are on one machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.contenders import ROOT, running_command
from benchmarks.grpc_load import COLUMNS
from benchmarks.load import Call, find_wrk, run_load
from benchmarks.machine import describe
from tilewire.service.cli.launch import running_server

ECHO, FLOOR, GRPC, HTTP = "grpc.aio echo", "grpc.aio floor", "Tilewire gRPC", "Tilewire HTTP"
TARGET, TARGET_PER_S = 0.8, 2500


@dataclass(frozen=True)
class Round:
    """One server under load for some seconds.

    Attributes:
        server: Name of the server.
        per_s: Answers per second.
        p50_us: Half of the latencies are below.
        p99_us: All but a hundredth are below.
        cpu_us: CPU time of the server's process for each answer, in microseconds, without the engine's.
        engine_us: CPU time of the engine for each answer, in microseconds; 0 for a server without one.
    """

    server: str
    per_s: float
    p50_us: float
    p99_us: float
    cpu_us: float
    engine_us: float


# Python modules of the servers' processes.
MODULES = {
    ECHO: "benchmarks.grpc_echo",
    FLOOR: "benchmarks.grpc_floor",
    GRPC: "tilewire.service.gateway.grpc",
    HTTP: "tilewire.service.gateway",
}
ENGINE = "tilewire.service.engine"
# Marks the processes of one run, in their environment.
MARK = "BENCH_GRPC_RUN"


@dataclass(frozen=True)
class Meter:
    """Measures the CPU time of this run's servers.

    Attributes:
        run: Value of the mark.
    """

    run: str

    def used(self, server: str) -> tuple[float, float]:
        """CPU time that a server's process and its engine have used, in microseconds."""
        return self._used(MODULES[server]), self._used(ENGINE) if server in (GRPC, HTTP) else 0.0

    def _used(self, name: str) -> float:
        mark, module = f"{MARK}={self.run}".encode(), name.encode()
        ticks = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if module in words and mark in (folder / "environ").read_bytes().split(b"\0"):
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    ticks += int(fields[11]) + int(fields[12])
        return 1e6 * ticks / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port of the loopback that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def measure_grpc(server: str, address: str, meter: Meter, arguments: argparse.Namespace) -> Round:
    """A round of gRPC calls from a process of their own.

    Raises:
        RuntimeError: A call failed.
    """
    words = ["--rows", arguments.rows, "--in-flight", arguments.in_flight, "--seconds", arguments.seconds]
    command = [sys.executable, "-m", "benchmarks.grpc_load", address, *map(str, words)]
    before = meter.used(server)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{server}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    used = used_since(before, meter.used(server), found["sent"])
    return Round(server, round(found["requests"] / found["seconds"]), found["p50_us"], found["p99_us"], *used)


def used_since(before: tuple[float, float], after: tuple[float, float], answers: float) -> tuple[float, float]:
    """CPU time of a server and its engine for each answer."""
    return round((after[0] - before[0]) / answers, 1), round((after[1] - before[1]) / answers, 1)


def measure_http(url: str, meter: Meter, arguments: argparse.Namespace) -> Round:
    """A round of requests with the same tensor over HTTP, as npy.

    Raises:
        RuntimeError: The load generator failed, or saw an error.
    """
    body = Path(arguments.folder, "x.npy")
    np.save(body, np.linspace(0, 1, arguments.rows * COLUMNS, dtype=np.float32).reshape(arguments.rows, COLUMNS))
    call = Call("/v1/softmax", "application/x-npy", body.read_bytes())
    httpx.post(url + call.path, content=call.body, headers={"content-type": call.content_type}).raise_for_status()
    before = meter.used(HTTP)
    found = run_load(url, [call], connections=arguments.in_flight, seconds=math.ceil(arguments.seconds), threads=1)
    used = used_since(before, meter.used(HTTP), found.requests)
    return Round(HTTP, round(found.per_s), found.p50_us, found.p99_us, *used)


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
        meter = Meter(uuid.uuid4().hex)
        env = {MARK: meter.run}
        plain = {name: stack.enter_context(running_command([MODULES[name]], env)) for name in (ECHO, FLOOR)}
        port = free_port()
        url = stack.enter_context(running_server("--grpc-port", str(port), *arguments.serve, env=env))
        identity = httpx.get(f"{url}/v2").json()
        for _ in range(arguments.rounds):
            for name, address in plain.items():
                rounds.append(measure_grpc(name, address.removeprefix("http://"), meter, arguments))
            rounds.append(measure_grpc(GRPC, f"127.0.0.1:{port}", meter, arguments))
            if find_wrk() is not None:
                rounds.append(measure_http(url, meter, arguments))
    ratios = report(rounds, arguments.rows * 4 * COLUMNS)
    if arguments.out is not None:
        found = {
            **describe(identity, "benchmarks.bench_grpc", argv),
            "rounds": [asdict(one) for one in rounds],
            "medians": [asdict(one) for one in medians(rounds).values()],
            "ratios": ratios,
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "grpc.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def medians(rounds: Sequence[Round]) -> dict[str, Round]:
    """The median of each measure of each server's rounds."""
    by_server = {
        name: [one for one in rounds if one.server == name] for name in dict.fromkeys(r.server for r in rounds)
    }
    measures = ("per_s", "p50_us", "p99_us", "cpu_us", "engine_us")
    return {
        server: Round(server, *(round(statistics.median(getattr(one, name) for one in mine), 1) for name in measures))
        for server, mine in by_server.items()
    }


def ratio(rounds: Sequence[Round], measure: str, above: str, below: str) -> float:
    """The median over the rounds of one server's measure to another's."""
    values = {name: [getattr(one, measure) for one in rounds if one.server == name] for name in (above, below)}
    found: float = statistics.median(a / b for a, b in zip(values[above], values[below], strict=True))
    return round(found, 2)


def report(rounds: Sequence[Round], nbytes: int) -> dict[str, float]:
    """Prints the medians and returns their ratios."""
    found = medians(rounds)
    print(
        f"{nbytes} bytes in and out\n{'server':>14} {'req/s':>8} {'p50 µs':>8} {'p99 µs':>8} {'CPU µs':>8} {'engine':>8}"
    )
    for one in found.values():
        print(
            f"{one.server:>14} {one.per_s:>8.0f} {one.p50_us:>8.0f} {one.p99_us:>8.0f} {one.cpu_us:>8.0f} "
            f"{one.engine_us:>8.0f}"
        )
    ratios = {
        "grpc_to_echo": ratio(rounds, "per_s", GRPC, ECHO),
        "floor_to_echo": ratio(rounds, "per_s", FLOOR, ECHO),
        "cpu_grpc_to_echo": ratio(rounds, "cpu_us", GRPC, ECHO),
    }
    print(
        f"gRPC to echo: {ratios['grpc_to_echo']} (wanted {TARGET}, and {TARGET_PER_S} requests/s); "
        f"floor to echo: {ratios['floor_to_echo']}; CPU time of a request, gRPC to echo: {ratios['cpu_grpc_to_echo']}"
    )
    if HTTP in found:
        ratios["http_to_grpc"] = ratio(rounds, "per_s", HTTP, GRPC)
        ratios["cpu_grpc_to_http"] = ratio(rounds, "cpu_us", GRPC, HTTP)
        print(
            f"HTTP to gRPC: {ratios['http_to_grpc']}; CPU time of a request, gRPC to HTTP: {ratios['cpu_grpc_to_http']}"
        )
    return ratios


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
