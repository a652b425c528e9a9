"""What HTTP costs: Tilewire beside what people use today and beside the raw socket, in one run on one machine.

    python -m benchmarks.bench_http --out benchmarks/results -- --gateways 8

Owns the questions, the ratios and the report; `contenders` starts the servers, `load` and `ingest` send. Every server
multiplies by the same bfloat16 weight, and its answer is checked before it is measured. A closed loop: each connection sends
its next request when its last was answered. Server, load generator and device are on one machine.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.bench_batching import command_of, safetensors_of
from benchmarks.contenders import (
    BODY_ONLY,
    LITSERVE,
    RAW,
    TILEWIRE,
    TWENTY_LINES,
    Array,
    Contender,
    contender,
    contenders,
)
from benchmarks.ingest import Ingest, measure_ingest
from benchmarks.load import run_load

# API processes, and further options of `lit_server`.
LITSERVES = ("1", "1:batch-timeout=0", "4", "4:fast-queue", "8:fast-queue")
PACKAGES = ("fastapi", "uvicorn", "httptools", "uvloop", "litserve", "numpy")


@dataclass(frozen=True)
class Question:
    """One load.

    Attributes:
        name: For the table.
        rows: In each request, of `--size` bfloat16 numbers; 0 for a square operand.
        connections: Kept busy.
        measure: `per_s`, of which more is better, or `p50_us`, of which less is.
        target: Least ratio to the 20-line server.
        p99_ms: Longest latency wanted; 0 for any.
    """

    name: str
    rows: int
    connections: int
    measure: str
    target: float
    p99_ms: float = 0


QUESTIONS = (
    Question("1 row, 64 connections", 1, 64, "per_s", 8, 10),
    Question("16 rows, 64 connections", 16, 64, "per_s", 6, 20),
    Question("square in and out, 4 connections", 0, 4, "per_s", 10),
    Question("1 row, 1 connection", 1, 1, "p50_us", 2),
)
INGEST_TARGET = 0.85
LITSERVE_TARGET = 10.0


@dataclass(frozen=True)
class Row:
    """One measurement of one server.

    Attributes:
        question: Of `QUESTIONS`.
        server: Its name.
        variant: How it was set up.
        body_bytes: Of a request.
        per_s: Requests per second.
        p50_us: Latency that half of the requests were under; likewise the others.
        p90_us: See above.
        p99_us: See above.
        requests: Answered.
    """

    question: str
    server: str
    variant: str
    body_bytes: int
    per_s: float
    p50_us: int
    p90_us: int
    p99_us: int
    requests: int


@dataclass(frozen=True)
class Ratio:
    """How Tilewire compares; over 1 it is the better one.

    Attributes:
        question: Asked of both.
        against: The other server, whose best variant counts; or what was wanted.
        measure: What was compared.
        ratio: See above.
        target: What was wanted of it; 0 for nothing.
    """

    question: str
    against: str
    measure: str
    ratio: float
    target: float


def run(argv: list[str]) -> int:
    """Runs every question on every server; prints rows and ratios, writes JSON."""
    arguments = _parse(argv)
    rng = np.random.default_rng(0)
    size = arguments.size
    weight = (rng.standard_normal((size, size)) / np.sqrt(size)).astype(ml_dtypes.bfloat16)
    rows: list[Row] = []
    flags = ["--device", arguments.device, "--arena-bytes", str(arguments.arena_bytes), *arguments.flags]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "weight.safetensors")
        file.write_bytes(safetensors_of(w=weight))
        for one in contenders(file, flags, arguments.litserve):
            rows += measure(one, weight, arguments.seconds, arguments.warm_up)
    taken, identity = measure_ingest(arguments.device, arguments.ingest_bytes, size)
    ratios = compare(rows, taken)
    report(ratios)
    if arguments.out is not None:
        content: dict[str, object] = {
            "rows": [asdict(row) for row in rows],
            "ingest": [asdict(one) for one in taken],
            "ratios": [asdict(one) for one in ratios],
        }
        write(arguments.out, content, identity, argv)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench http", description=__doc__)
    parser.add_argument("--device", default="auto", help="of Tilewire; the others take CUDA when it is there")
    parser.add_argument("--seconds", type=int, default=4, help="of each load; whole seconds")
    parser.add_argument("--warm-up", type=int, default=1, help="seconds before each load; 0 for none")
    parser.add_argument("--size", type=int, default=4096, help="of the square weight")
    parser.add_argument("--ingest-bytes", type=int, default=2**30)
    parser.add_argument("--arena-bytes", type=int, default=4 * 2**30)
    parser.add_argument("--litserve", nargs="*", default=list(LITSERVES), metavar="APIS[:OPTION…]")
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="further flags of `tilewire serve`, after --")
    return parser.parse_args(argv)


def measure(one: Contender, weight: Array, seconds: int, warm_up_s: int) -> list[Row]:
    """Asks one server every question."""
    rng = np.random.default_rng(1)
    size = len(weight)
    checked = rng.standard_normal((16, size)).astype(ml_dtypes.bfloat16)
    rows = []
    with contender(one, checked, weight) as url:
        for question in QUESTIONS:
            operand = rng.standard_normal((question.rows or size, size)).astype(ml_dtypes.bfloat16)
            calls = [one.call(operand)]
            if warm_up_s:
                run_load(url, calls, connections=question.connections, seconds=warm_up_s)
            load = run_load(url, calls, connections=question.connections, seconds=seconds)
            row = Row(
                question.name,
                one.name,
                one.variant,
                len(calls[0].body),
                load.per_s,
                load.p50_us,
                load.p90_us,
                load.p99_us,
                load.requests,
            )
            _show(row)
            rows.append(row)
    return rows


def _show(row: Row) -> None:
    print(
        f"{row.question:<34} {row.server:<10} {row.variant:<22.22} {row.per_s:>9.0f}/s  p50 {row.p50_us / 1e3:>8.2f} ms  "
        f"p99 {row.p99_us / 1e3:>8.2f} ms",
        flush=True,
    )


def compare(rows: Sequence[Row], taken: Sequence[Ingest]) -> list[Ratio]:
    """Tilewire against the 20-line server, LitServe's best, and the raw socket."""
    ratios = []
    for question in QUESTIONS:
        asked = [row for row in rows if row.question == question.name]
        ours = next(row for row in asked if row.server == TILEWIRE)
        for server, target in ((TWENTY_LINES, question.target), (LITSERVE, LITSERVE_TARGET), (BODY_ONLY, 0), (RAW, 0)):
            others = [row for row in asked if row.server == server]
            if others:
                ratio = max(1e-9, min(_gain(question, ours, row) for row in others))
                ratios.append(Ratio(question.name, server, question.measure, ratio, target))
        if question.p99_ms:
            ratios.append(
                Ratio(question.name, f"{question.p99_ms:g} ms", "p99_us", question.p99_ms * 1e3 / ours.p99_us, 1)
            )
    return ratios + compare_ingest({one.server: one for one in taken})


def compare_ingest(taken: Mapping[str, Ingest]) -> list[Ratio]:
    """Tilewire against the raw socket, by the client's clock and by its own."""
    ours, raw = taken[TILEWIRE], taken[RAW]
    ratios = [Ratio(ours.question, RAW, "gb_per_s", ours.gb_per_s / raw.gb_per_s, INGEST_TARGET)]
    if ours.receive_gb_per_s is not None:
        ratio = ours.receive_gb_per_s / raw.gb_per_s
        ratios.append(Ratio(ours.question, RAW, "receive_gb_per_s", ratio, INGEST_TARGET))
    return ratios


def _gain(question: Question, ours: Row, other: Row) -> float:
    if question.measure == "p50_us":
        return other.p50_us / max(1, ours.p50_us)
    return ours.per_s / max(1e-9, other.per_s)


def report(ratios: Sequence[Ratio]) -> None:
    """Prints the ratios beside what they should be."""
    print()
    for one in ratios:
        wanted = (
            "" if not one.target else f"  wanted {one.target:g}: {'reached' if one.ratio >= one.target else 'MISSED'}"
        )
        print(f"{one.question:<34} {one.measure:<17} against {one.against:<11} {one.ratio:>7.2f}×{wanted}")


def write(folder: Path, content: dict[str, object], identity: dict[str, Any], argv: Sequence[str]) -> None:
    """Writes what was measured, with what it was measured on."""
    engine = identity["engines"][0]
    about = {
        "question": "what HTTP costs",
        "device": engine["device_name"],
        "backend": engine["backend"],
        "cores": os.cpu_count(),
        "versions": {
            "tilewire": identity["version"],
            "python": platform.python_version(),
            "torch": engine["torch"],
            "triton": engine["triton"],
            **{name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)},
        },
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": command_of("benchmarks.bench_http", argv),
    }
    path = folder / "bench_http.json"
    path.write_text(json.dumps(about | content, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
