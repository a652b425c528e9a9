"""What batching gains: throughput, latency and GPU time per request over concurrency, batching on and off, on a real server.

    python -m benchmarks.bench_batching --device cuda:0 --seconds 4 --out benchmarks/results

Owns the questions and the report; `load` sends. Server, load generator and device are on one machine.
"""

from __future__ import annotations

import argparse
import datetime as dt
import io
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread

import httpx
import ml_dtypes
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

import tilewire
from benchmarks.command import command_of, out_folder
from benchmarks.load import Call, Load, run_load
from benchmarks.svg import Series, plot
from tilewire.service.cli.launch import running_server

SHARED = "shared weight"
CONCURRENCIES = (1, 4, 16, 64, 256)
NPY, SAFETENSORS = "application/x-npy", "application/x-safetensors"
# Long enough for the counters of other processes to be handed over.
SETTLE_S = 0.2
RARE_REQUESTS = 300
LONE_ROUNDS = 7


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        question: Which of the report's tables it belongs to.
        batching: Most requests in a launch.
        connections: That were kept busy.
        per_s: Requests per second.
        p50_us: Latency; likewise p99.
        p99_us: See above.
        mean_batch: Requests per launch.
        kernel_us: Kernel time per request.
    """

    question: str
    batching: int
    connections: int
    per_s: float
    p50_us: int
    p99_us: int
    mean_batch: float
    kernel_us: float


class Counters:
    """Sums of `/metrics` by metric name, over all labels."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._read()

    def since(self, name: str) -> float:
        """How much a counter grew since this was made."""
        return self._read().get(name, 0.0) - self._before.get(name, 0.0)

    def _read(self) -> dict[str, float]:
        time.sleep(SETTLE_S)
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self._url}/metrics").text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals


def npy_of(array: np.ndarray) -> bytes:
    """A tensor as an npy body."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def safetensors_of(**tensors: np.ndarray) -> bytes:
    """Tensors as a safetensors body: the bytes that the client package would send."""
    header: dict[str, object] = {}
    payload = b""
    codes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    for name, tensor in tensors.items():
        data = tensor.tobytes()
        header[name] = {
            "dtype": codes[str(tensor.dtype)],
            "shape": tensor.shape,
            "data_offsets": [len(payload), len(payload) + len(data)],
        }
        payload += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + payload


def measure(url: str, question: str, calls: Sequence[Call], batching: int, connections: int, seconds: float) -> Row:
    """Loads the server and reads what it counted meanwhile."""
    run_load(url, calls, connections=connections, seconds=1)
    counters = Counters(url)
    load = run_load(url, calls, connections=connections, seconds=seconds)
    launches = counters.since("tilewire_batch_requests_count")
    jobs = counters.since("tilewire_batch_requests_sum")
    kernel_s = counters.since("tilewire_kernel_seconds_total")
    return row_of(question, batching, connections, load, jobs / max(1, launches), kernel_s / max(1, jobs) * 1e6)


def row_of(question: str, batching: int, connections: int, load: Load, mean_batch: float, kernel_us: float) -> Row:
    """Puts a row together and prints it."""
    row = Row(question, batching, connections, load.per_s, load.p50_us, load.p99_us, mean_batch, kernel_us)
    print(
        f"{question:<28} batch ≤{batching:>3}  {connections:>3} conn  {row.per_s:>8.0f}/s  p50 {row.p50_us:>7} µs  "
        f"p99 {row.p99_us:>7} µs  mean batch {mean_batch:>5.1f}  kernel {kernel_us:>7.1f} µs/request",
        flush=True,
    )
    return row


@contextmanager
def server(device: str, batching: int, flags: Sequence[str]) -> Iterator[str]:
    """A server with the weights that the questions use."""
    with running_server("--device", device, "--max-batch-requests", str(batching), *flags) as url:
        rng = np.random.default_rng(0)
        with tilewire.Client(url, timeout=600) as client:
            client.put("w", rng.standard_normal((4096, 4096)).astype(ml_dtypes.bfloat16))
            client.put("w2", rng.standard_normal((1024, 1024)).astype(np.float32))
        yield url


def shared_weight_calls() -> list[Call]:
    """16 rows of bfloat16 against the resident 4096 × 4096."""
    rows = np.random.default_rng(1).standard_normal((16, 4096)).astype(ml_dtypes.bfloat16)
    return [Call("/v1/matmul?b=@w", SAFETENSORS, safetensors_of(a=rows))]


def mixed_calls() -> list[Call]:
    """Five shapes of each op in turn."""
    rng = np.random.default_rng(2)
    calls = []
    for rows in (1, 4, 8, 16, 32):
        x = rng.standard_normal((rows, 1024)).astype(np.float32)
        calls += [
            Call("/v1/matmul?b=@w2", NPY, npy_of(x)),
            Call("/v1/softmax", NPY, npy_of(x)),
            Call("/v1/add", SAFETENSORS, safetensors_of(a=x, b=x)),
        ]
    return calls


def unequal_calls() -> list[Call]:
    """64 small products, no two of one shape."""
    rng = np.random.default_rng(3)
    calls = []
    for number in range(64):
        m, k, n = 8 + 3 * number, 16 + 2 * number, 200 - 3 * number
        a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)
        calls.append(Call("/v1/matmul", SAFETENSORS, safetensors_of(a=a, b=b)))
    return calls


def rare_p99_us(url: str) -> float:
    """99th percentile of a softmax whose row length nobody else uses, one at a time."""
    x = np.random.default_rng(4).standard_normal((4, 777)).astype(np.float32)
    body = npy_of(x)
    latencies = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(RARE_REQUESTS):
            began_s = time.perf_counter()
            client.post("/v1/softmax", content=body).raise_for_status()
            latencies.append((time.perf_counter() - began_s) * 1e6)
    return float(np.percentile(latencies, 99))


def rare_key(url: str, seconds: float) -> dict[str, float]:
    """The rare key's p99 alone, and while 64 connections send the mix."""
    rare_p99_us(url)
    alone = rare_p99_us(url)
    thread = Thread(
        target=run_load, args=(url, mixed_calls()), kwargs={"connections": 64, "seconds": max(6.0, seconds)}
    )
    thread.start()
    time.sleep(1)
    beside = rare_p99_us(url)
    thread.join()
    print(f"a rare key: p99 {alone:.0f} µs alone, {beside:.0f} µs beside 64 connections ({beside / alone:.1f}×)")
    return {"alone_p99_us": alone, "beside_p99_us": beside}


def one_connection(on: str, off: str) -> dict[str, float | list[int]]:
    """The p50 of one connection with batching and without, in turns: two moments differ by more than batching adds."""
    p50s: dict[str, list[int]] = {on: [], off: []}
    for number in range(LONE_ROUNDS + 1):
        for url in (on, off):
            load = run_load(url, shared_weight_calls(), connections=1, seconds=1)
            if number:  # The first round warms up.
                p50s[url].append(load.p50_us)
    ratio = statistics.median(p50s[on]) / statistics.median(p50s[off])
    print(f"one connection, in turns: p50 {p50s[on]} µs with batching, {p50s[off]} without: {ratio:.3f}×", flush=True)
    return {"on_p50_us": p50s[on], "off_p50_us": p50s[off], "ratio": ratio}


def run(argv: list[str]) -> int:
    """Runs every question; prints rows and ratios, writes JSON."""
    parser = argparse.ArgumentParser(prog="bench batching", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--concurrencies", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--out", type=out_folder)
    parser.add_argument("flags", nargs="*", help="further flags of `tilewire serve`, after --")
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    seconds, flags = arguments.seconds, arguments.flags
    # Both at once: whoever is not asked sleeps, and what is compared closely is measured in turns.
    with server(arguments.device, 64, flags) as on, server(arguments.device, 1, flags) as off:
        identity = httpx.get(f"{on}/v2").json()
        lone = one_connection(on, off)
        for batching, url in ((64, on), (1, off)):
            rows += [
                measure(url, SHARED, shared_weight_calls(), batching, connections, seconds)
                for connections in arguments.concurrencies
            ]
            for question, calls in (
                ("mix of 5 shapes × 3 ops", mixed_calls()),
                ("64 unequal products", unequal_calls()),
            ):
                rows.append(measure(url, question, calls, batching, 64, seconds))
        rare = rare_key(on, seconds)
    report(rows)
    if arguments.out is not None:
        write(arguments.out, rows, {"rare_key": rare, "one_connection": lone}, identity, argv)
    return 0


def report(rows: Sequence[Row]) -> None:
    """Prints what batching gained."""
    on = {(row.question, row.connections): row for row in rows if row.batching > 1}
    for row in rows:
        other = on.get((row.question, row.connections))
        if row.batching == 1 and other is not None:
            print(
                f"{row.question:<28} {row.connections:>3} conn: {other.per_s / row.per_s:.2f}× the rate, "
                f"{row.kernel_us / max(other.kernel_us, 1e-9):.1f}× less kernel time, p50 {other.p50_us / row.p50_us:.2f}×, "
                f"p99 over p50 {other.p99_us / other.p50_us:.1f}, mean batch {other.mean_batch:.1f}"
            )


def write(
    folder: Path, rows: Sequence[Row], others: dict[str, object], identity: dict[str, object], argv: list[str]
) -> None:
    """Writes what was measured, with what it was measured on.

    Args:
        folder: Where to.
        rows: Of the tables.
        others: What is no row, by name.
        identity: What the server says of itself.
        argv: How the benchmark was called.
    """
    engines = identity["engines"]
    assert isinstance(engines, list), "This is a bug."
    name = str(engines[0]["device_name"])
    content = {
        "question": "what batching gains",
        "device": name,
        "backend": engines[0]["backend"],
        "versions": {
            "tilewire": identity["version"],
            "python": platform.python_version(),
            "torch": engines[0]["torch"],
            "triton": engines[0]["triton"],
        },
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": command_of("benchmarks.bench_batching", argv),
        "rows": [asdict(row) for row in rows],
        **others,
    }
    stem = f"batching-{name.lower().replace(' ', '-')}"
    (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / f"{stem}.svg").write_text(draw(content["rows"]))
    print(f"wrote {folder / stem}.json and .svg")


def draw(rows: object) -> str:
    """Plots the rate over the connections, batching on and off."""
    assert isinstance(rows, list), "This is a bug."
    series = []
    for batching in sorted({row["batching"] for row in rows}, reverse=True):
        chosen = [row for row in rows if row["batching"] == batching and row["question"] == SHARED]
        label = "batching off" if batching == 1 else f"at most {batching}"
        series.append(Series(label, [(row["connections"], row["per_s"]) for row in chosen]))
    return plot("16×4096 bf16 rows on one resident 4096×4096", "connections", "requests/s", series)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
