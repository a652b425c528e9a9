"""What HTTP costs: Tilewire beside what people use today and beside the raw socket, in one run on one machine.

    python -m benchmarks.bench_http --out benchmarks/results -- --gateways 8

Owns the questions, the ratios and the report; `contenders` starts the servers, `load` and `ingest` send. Every server
multiplies by the same bfloat16 weight, and its answer is checked before it is measured. A closed loop: each connection sends
its next request when its last was answered. Server, load generator and device are on one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.bench_batching import safetensors_of
from benchmarks.command import out_folder
from benchmarks.contenders import (
    BODY_ONLY,
    FAILURES,
    LITSERVE,
    RAW,
    TILEWIRE,
    TWENTY_LINES,
    Array,
    Contender,
    Failure,
    contender,
    contenders,
)
from benchmarks.ingest import Ingest, measure_ingest
from benchmarks.load import Load, run_load
from benchmarks.machine import describe

# API processes, and further options of `lit_server`.
LITSERVES = ("1", "1:batch-timeout=0", "4", "4:fast-queue", "8:fast-queue")


@dataclass(frozen=True)
class Question:
    """One load.

    Attributes:
        text: For the table; `{bytes}` stands for the size of the operand.
        rows: In each request, of `--size` bfloat16 numbers; 0 for a square operand.
        connections: Kept busy.
        measure: `per_s`, of which more is better, or `p50_us`, of which less is.
        target: Least ratio to the 20-line server.
        p99_ms: Longest latency wanted; 0 for any.
    """

    text: str
    rows: int
    connections: int
    measure: str
    target: float
    p99_ms: float = 0

    def name(self, size: int) -> str:
        """For the table."""
        return self.text.format(bytes=bytes_text(2 * (self.rows or size) * size))


QUESTIONS = (
    Question("{bytes} bodies, 64 connections", 1, 64, "per_s", 8, 10),
    Question("{bytes} bodies, 256 connections", 1, 256, "per_s", 8),
    Question("{bytes} bodies, 64 connections", 16, 64, "per_s", 6, 20),
    Question("{bytes} in and out, 4 connections", 0, 4, "per_s", 10),
    Question("{bytes} bodies, one connection", 1, 1, "p50_us", 2),
)
INGEST_TARGET = 0.85
LITSERVE_TARGET = 10.0


def bytes_text(nbytes: int) -> str:
    """A size as a person writes it."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((f"{nbytes / unit:.4g} {name}" for unit, name in units if nbytes >= unit), f"{nbytes} bytes")


@dataclass(frozen=True)
class Row:
    """One measurement of one server.

    Attributes:
        question: The name of one of `QUESTIONS`.
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
    """Runs every question on every server; prints rows and ratios, writes JSON.

    Returns:
        0; 1 when something could not be measured.
    """
    arguments = _parse(argv)
    size = arguments.size
    weight = weight_of(size)
    rows: list[Row] = []
    failures: list[Failure] = []
    flags = ["--device", arguments.device, "--arena-bytes", str(arguments.arena_bytes), *arguments.flags]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "weight.safetensors")
        file.write_bytes(safetensors_of(w=weight))
        for one in contenders(file, flags, arguments.litserve):
            rows += measure(one, weight, arguments.seconds, arguments.warm_up, failures)
    taken, identity = measure_ingest(arguments.device, arguments.ingest_bytes, size, failures)
    ratios = compare(rows, size) + compare_ingest({one.server: one for one in taken})
    report(rows, ratios, size)
    for failure in failures:
        print(f"NOT MEASURED: {failure}")
    if arguments.out is not None:
        content: dict[str, object] = {
            "question": "what HTTP costs",
            **describe(identity, "benchmarks.bench_http", argv),
            "rows": [asdict(row) for row in rows],
            "ingest": [asdict(one) for one in taken],
            "ratios": [asdict(one) for one in ratios],
            "failures": [asdict(one) for one in failures],
        }
        path = arguments.out / "bench_http.json"
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {path}")
    return 1 if failures else 0


def weight_of(size: int) -> Array:
    """The square weight that all servers multiply by; it keeps the size of what it is multiplied with."""
    weight: Array = np.random.default_rng(0).standard_normal((size, size)) / np.sqrt(size)
    return weight.astype(ml_dtypes.bfloat16)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench http", description=__doc__)
    parser.add_argument("--device", default="auto", help="of Tilewire; the others take CUDA when it is there")
    parser.add_argument("--seconds", type=int, default=4, help="of each load; whole seconds")
    parser.add_argument("--warm-up", type=int, default=1, help="seconds before each load; 0 for none")
    parser.add_argument("--size", type=int, default=4096, help="of the square weight")
    parser.add_argument("--ingest-bytes", type=int, default=2**30)
    parser.add_argument("--arena-bytes", type=int, default=4 * 2**30)
    parser.add_argument("--litserve", nargs="*", default=list(LITSERVES), metavar="APIS[:OPTION…]")
    parser.add_argument("--out", type=out_folder)
    parser.add_argument("flags", nargs="*", help="further flags of `tilewire serve`, after --")
    return parser.parse_args(argv)


def measure(one: Contender, weight: Array, seconds: int, warm_up_s: int, failures: list[Failure]) -> list[Row]:
    """Asks one server every question; adds what it failed at."""
    rng = np.random.default_rng(1)
    size = len(weight)
    checked = rng.standard_normal((16, size)).astype(ml_dtypes.bfloat16)
    rows = []
    try:
        with contender(one, checked, weight) as url:
            for question in QUESTIONS:
                operand = rng.standard_normal((question.rows or size, size)).astype(ml_dtypes.bfloat16)
                try:
                    row = _ask(one, url, question, operand, seconds, warm_up_s)
                except FAILURES as error:
                    failures.append(Failure.of(error, one.name, one.variant, question.name(size)))
                    continue
                _show(row)
                rows.append(row)
    except FAILURES as error:
        failures.append(Failure.of(error, one.name, one.variant))
    return rows


def _ask(one: Contender, url: str, question: Question, operand: Array, seconds: int, warm_up_s: int) -> Row:
    calls = [one.call(operand)]
    if warm_up_s:
        run_load(url, calls, connections=question.connections, seconds=warm_up_s)
    load: Load = run_load(url, calls, connections=question.connections, seconds=seconds)
    return Row(
        question.name(operand.shape[1]),
        one.name,
        one.variant,
        len(calls[0].body),
        load.per_s,
        load.p50_us,
        load.p90_us,
        load.p99_us,
        load.requests,
    )


def _show(row: Row) -> None:
    print(
        f"{row.question:<34} {row.server:<10} {row.variant:<22.22} {row.per_s:>9.0f}/s  p50 {row.p50_us / 1e3:>8.2f} ms  "
        f"p99 {row.p99_us / 1e3:>8.2f} ms",
        flush=True,
    )


def compare(rows: Sequence[Row], size: int) -> list[Ratio]:
    """Tilewire against the 20-line server, LitServe's best, and the raw socket; what was not measured is left out."""
    ratios = []
    for question in QUESTIONS:
        name = question.name(size)
        ours = best(rows, question, TILEWIRE, size)
        if ours is None:
            continue
        for server, target in ((TWENTY_LINES, question.target), (LITSERVE, LITSERVE_TARGET), (BODY_ONLY, 0), (RAW, 0)):
            other = best(rows, question, server, size)
            if other is not None:
                ratios.append(Ratio(name, server, question.measure, max(1e-9, _gain(question, ours, other)), target))
        if question.p99_ms:
            ratios.append(Ratio(name, f"{question.p99_ms:g} ms", "p99_us", question.p99_ms * 1e3 / ours.p99_us, 1))
    return ratios


def best(rows: Sequence[Row], question: Question, server: str, size: int) -> Row | None:
    """The row of the server's variant that answers this question best."""
    asked = [row for row in rows if row.question == question.name(size) and row.server == server]
    if question.measure == "p50_us":
        return min(asked, key=lambda row: row.p50_us, default=None)
    return max(asked, key=lambda row: row.per_s, default=None)


def compare_ingest(taken: Mapping[str, Ingest]) -> list[Ratio]:
    """Tilewire against the raw socket, by the client's clock and by its own."""
    ours, raw = taken.get(TILEWIRE), taken.get(RAW)
    if ours is None or raw is None:
        return []
    ratios = [Ratio(ours.question, RAW, "gb_per_s", ours.gb_per_s / raw.gb_per_s, INGEST_TARGET)]
    if ours.receive_gb_per_s is not None:
        ratio = ours.receive_gb_per_s / raw.gb_per_s
        ratios.append(Ratio(ours.question, RAW, "receive_gb_per_s", ratio, INGEST_TARGET))
    return ratios


def _gain(question: Question, ours: Row, other: Row) -> float:
    if question.measure == "p50_us":
        return other.p50_us / max(1, ours.p50_us)
    return ours.per_s / max(1e-9, other.per_s)


def report(rows: Sequence[Row], ratios: Sequence[Ratio], size: int) -> None:
    """Prints every server's best as a table, and the ratios beside what they should be."""
    servers = (TWENTY_LINES, LITSERVE, BODY_ONLY, RAW, TILEWIRE)
    print("\n| load |", " | ".join(servers), "|\n|---|" + "---|" * len(servers))
    for question in QUESTIONS:
        cells = [_cell(question, best(rows, question, server, size)) for server in servers]
        print(f"| {question.name(size)} |", " | ".join(cells), "|")
    print()
    for one in ratios:
        verdict = "reached" if one.ratio >= one.target else "MISSED"
        wanted = f"  wanted {one.target:g}: {verdict}" if one.target else ""
        print(f"{one.question:<34} {one.measure:<17} against {one.against:<11} {one.ratio:>7.2f}×{wanted}")


def _cell(question: Question, row: Row | None) -> str:
    if row is None:
        return "not measured"
    if question.measure == "p50_us":
        return f"p50 {row.p50_us / 1e3:.2f} ms"
    variant = f" ({row.variant})" if row.variant else ""
    return f"{row.per_s:,.0f}/s, p99 {row.p99_us / 1e3:.1f} ms{variant}"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
