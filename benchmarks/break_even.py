"""When a product on the server is faster than NumPy where it is called: computed from measured figures.

    python -m benchmarks.break_even                 prints the table of docs/worth-it.md
    python -m benchmarks.break_even --measure       measures NumPy and the client here first, into benchmarks/results

A call takes the client's own time, a lone request's time, its bytes at the link's rate, the bus, and the kernel. The parts
come from `benchmarks/results`: numpy.json, bench_http.json, shared_memory-….json, kernels.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_client import echo_server, measure
from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results"
NUMPY = "numpy.json"
SIZES = (256, 512, 1024, 2048, 4096)
# Long enough that one of the products has the machine to itself.
SECONDS, MIN_REPEATS = 4.0, 3
ITEMSIZE = 4
# What Ethernet and TCP leave of a link for payloads, with frames of 1,500 bytes: 1,448 of 1,538.
PAYLOAD_PART = 1448 / 1538
# Of a switch in one room; a loopback has none.
ROUND_TRIP_S = 1e-4
GBIT = 1e9 / 8
LINKS = {"loopback": None, "100 Gbit/s": 100 * GBIT, "10 Gbit/s": 10 * GBIT}
# Matrices of N × N that cross the link, of three.
_TABLE = re.compile(r"(<!-- [^>]*break_even -->\n)(.*?)(<!-- /table -->\n)", re.DOTALL)
WAYS = {"both operands and the result travel": 3, "one operand is resident": 2, "everything stays (`store=`)": 0}


@dataclass(frozen=True)
class Measured:
    """Measured parts of a call.

    Attributes:
        numpy_s: Seconds of NumPy's product by N.
        client_s: Seconds that the client takes for itself, for a small body.
        lone_s: Seconds of a lone small request.
        host_bytes_per_s: Rate at which one connection's bytes are received.
        bus_bytes_per_s: Rate between host and device.
        flops_per_s: FLOP/s of float32 products by N.
    """

    numpy_s: Mapping[int, float]
    client_s: float
    lone_s: float
    host_bytes_per_s: float
    bus_bytes_per_s: float
    flops_per_s: Mapping[int, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--measure", action="store_true", help="measure NumPy and the client on this machine first")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    arguments = parser.parse_args(argv)
    if arguments.measure:
        write_numpy(RESULTS / NUMPY, list(argv if argv is not None else sys.argv[1:]))
    table = page_of(read(RESULTS))
    if arguments.write is None:
        print(table, end="")
    else:
        page = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(_TABLE.sub(lambda found: f"{found[1]}\n{table}\n{found[3]}", page), encoding="utf-8")
    return 0


def write_numpy(path: Path, argv: list[str]) -> None:
    """Measures products by NumPy and the client's own time, and writes both."""
    rows = [{"n": n, "best_s": best_of_numpy(n)} for n in SIZES]
    with echo_server() as port:
        medians_us = measure(port, 4096)
    result = {
        "question": "float32 products by NumPy where the caller is, and the client's own time",
        **describe({}, "benchmarks.break_even", argv),
        "rows": rows,
        "client_us": round(medians_us["client"] - medians_us["socket"], 1),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def best_of_numpy(n: int) -> float:
    """Seconds of the fastest of some products of N × N."""
    rng = np.random.default_rng(n)
    a, b = (rng.standard_normal((n, n), np.float32) for _ in range(2))
    times: list[float] = []
    end_s = time.perf_counter() + SECONDS
    while len(times) < MIN_REPEATS or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began_s)
    return min(times)


def read(folder: Path) -> Measured:
    """Reads the measured parts."""
    files: dict[str, Any] = {
        name: json.loads((folder / file).read_text(encoding="utf-8"))
        for name, file in {
            "numpy": NUMPY,
            "http": "bench_http.json",
            "kernels": "kernels.json",
            "bus": "shared_memory-nvidia-h100-80gb-hbm3.json",
        }.items()
    }
    lone = next(
        row for row in files["http"]["rows"] if row["server"] == "Tilewire" and "one connection" in row["question"]
    )
    large = next(row for row in files["http"]["ingest"] if row["server"] == "Tilewire")
    bus = next(row for row in files["bus"]["rows"] if row["way"].startswith("the bus alone"))
    products = [row for row in files["kernels"]["rows"] if row["group"] == "fp32 ieee"]
    return Measured(
        {row["n"]: row["best_s"] for row in files["numpy"]["rows"]},
        files["numpy"]["client_us"] / 1e6,
        lone["p50_us"] / 1e6,
        large["gb_per_s"] * 1e9,
        # 64 MiB in, 32 MiB out.
        96 * 2**20 / (bus["p50_ms"] / 1e3),
        {row["shape"][0]: row["flops"] / sorted(row["us"]["tilewire"])[1] * 1e6 for row in products},
    )


def call_s(measured: Measured, n: int, matrices: int, link: float | None) -> float:
    """Seconds of one call.

    Args:
        measured: Measured parts.
        n: Rows and columns of each matrix.
        matrices: How many of the three cross the link.
        link: Bytes a second, or None for the loopback.
    """
    nbytes = matrices * n * n * ITEMSIZE
    rate = measured.host_bytes_per_s if link is None else min(measured.host_bytes_per_s, link * PAYLOAD_PART)
    nearest = min(measured.flops_per_s, key=lambda size: abs(size - n))
    kernel_s = 2 * n**3 / measured.flops_per_s[nearest]
    round_trip_s = 0.0 if link is None else ROUND_TRIP_S
    return (
        measured.client_s
        + measured.lone_s
        + round_trip_s
        + nbytes / rate
        + nbytes / measured.bus_bytes_per_s
        + kernel_s
    )


def page_of(measured: Measured) -> str:
    """The table in Markdown: how many times as fast as NumPy each call is."""
    lines = [
        f"| what travels | link | {' | '.join(f'{n}²' for n in measured.numpy_s)} |",
        f"|---|---|{'---|' * len(measured.numpy_s)}",
        f"| NumPy, in ms | | {' | '.join(_figure(1e3 * one) for one in measured.numpy_s.values())} |",
    ]
    for way, matrices in WAYS.items():
        for name, link in LINKS.items():
            factors = [numpy_s / call_s(measured, n, matrices, link) for n, numpy_s in measured.numpy_s.items()]
            cells = [f"**{_figure(one)}×**" if one >= 1 else f"{_figure(one)}×" for one in factors]
            lines.append(f"| {way} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
