"""How long a start takes with an empty kernel cache and with a full one, and whether any request then waits for something.

`python -m benchmarks.bench_start [--device cuda:0] [--requests 2000] [--out benchmarks/results]`

Owns its kernel cache, a temporary folder: nothing that was compiled before counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import tilewire
from benchmarks.bench_batching import npy_of
from benchmarks.bench_overload import Sender
from benchmarks.machine import describe
from benchmarks.stalls import MIN_S, Stalls
from tilewire import Client

# A request may take this many times the median of its class.
OUTLIER = 5.0
SHOWN = 5
# Bodies of the bursts, and connections that send them.
BURST_BYTES = (2**13, 2**17, 2**19, 2**23)
BURST_CONNECTIONS = 16
CLIENT_TIMEOUT_S = 30.0
START_TIMEOUT_S = 600.0
_STAGE = re.compile(r"warmed up: (\w+) in ([0-9.]+) s")
_COMPILES = re.compile(r'^tilewire_kernel_compiles_total\{.*phase="(\w+)".*\} ([0-9.e+]+)', re.MULTILINE)
_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
_ACTIVATIONS = ("none", "relu", "leaky_relu", "gelu", "silu", "sigmoid", "tanh")


@dataclass(frozen=True)
class Started:
    """One start.

    Attributes:
        url: Of the server.
        ready_s: From the command to ready.
        stages: Seconds by stage of the engine's warm-up.
    """

    url: str
    ready_s: float
    stages: dict[str, float]


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        op: Of it.
        operands: By name.
        options: Of the op.
        size: Its class: requests of about the same work and bytes.
    """

    op: str
    operands: dict[str, Any]
    options: dict[str, Any]
    size: str

    def shown(self) -> dict[str, Any]:
        """The request in words."""
        operands = {name: f"{array.dtype}{list(array.shape)}" for name, array in self.operands.items()}
        return {"op": self.op, "operands": operands, "options": self.options}


@dataclass(frozen=True)
class Answered:
    """One request that was answered.

    Attributes:
        number: Which of them.
        spent_s: For the client.
        begin_s: By `time.monotonic`.
        size: Its class.
        asked: In words.
        timings_ms: The server's, by stage.
    """

    number: int
    spent_s: float
    begin_s: float
    size: str
    asked: dict[str, Any]
    timings_ms: dict[str, float]

    def shown(self, ratio: float, stall_s: float) -> dict[str, Any]:
        """For a report: `ratio` is to the median of its class; what does next to nothing waited for `stall_s` meanwhile."""
        figures = {"number": self.number, "ms": round(self.spent_s * 1e3, 3), "ratio": round(ratio, 2)}
        figures["machine_stood_still_ms"] = round(stall_s * 1e3, 3)
        return figures | {"server_timing_ms": self.timings_ms} | self.asked


def run(argv: list[str]) -> int:
    """Run the benchmark with command-line arguments `argv`; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="as in tilewire serve")
    parser.add_argument("--requests", type=int, default=2000, help="requests of random shapes after each start")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--largest", type=int, default=1024, help="most elements along one dimension")
    parser.add_argument("--burst-s", type=float, default=3.0, help="length of the burst of each size")
    parser.add_argument("--cache", type=Path, help="a kernel cache to start with instead of an empty one")
    parser.add_argument("--out", type=Path, help="folder for start.json")
    arguments = parser.parse_args(argv)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tilewire-kernels-") as empty:
        cache = arguments.cache or Path(empty)
        for name in ("first", "second", "third"):
            with started(cache, arguments.device) as server:
                print(f"{name} start: ready in {server.ready_s:.1f} s; {server.stages}", flush=True)
                results[name] = {"ready_s": round(server.ready_s, 2), "stages_s": server.stages}
                if name == "second":
                    results["requests"] = ask_all(server.url, arguments)
                if name == "third":
                    results["bursts"] = asyncio.run(burst(server.url, arguments.burst_s))
                results[name]["compiles"] = compiles_of(server.url)
                identity = httpx.get(f"{server.url}/v2").json()
            print(f"{name} start: kernels compiled {results[name]['compiles']}", flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        machine = describe(identity, "benchmarks.bench_start", argv)
        (arguments.out / "start.json").write_text(json.dumps(machine | results, indent=1) + "\n")
    return 0 if not results["second"]["compiles"].get("serving") else 1


@contextmanager
def started(cache: Path, device: str) -> Iterator[Started]:
    """A server with its kernels in `cache`, drained at the end."""
    variables = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TILEWIRE_LOG_FORMAT": "console"}
    command = [
        sys.executable,
        "-P",
        "-m",
        "tilewire",
        "serve",
        "--port",
        "0",
        "--device",
        device,
        "--forbid-serving-compiles",
    ]
    with tempfile.TemporaryFile("w+") as log:
        begin = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables) as process:
            try:
                assert process.stdout is not None, "This is a bug."
                url = next(found[1] for line in process.stdout if (found := re.search(r"at (https?://\S+)", line)))
                ready_s = time.monotonic() - begin
                log.seek(0)
                stages = {stage: float(spent) for stage, spent in _STAGE.findall(log.read())}
                yield Started(url, ready_s, stages)
            except StopIteration:
                log.seek(0)
                raise SystemExit(f"the server did not start:\n{log.read()[-4000:]}") from None
            finally:
                process.terminate()
                process.wait(START_TIMEOUT_S)


def compiles_of(url: str) -> dict[str, float]:
    """Kernels compiled, by phase."""
    time.sleep(0.2)
    totals: dict[str, float] = defaultdict(float)
    for phase, count in _COMPILES.findall(httpx.get(f"{url}/metrics").text):
        totals[phase] += float(count)
    return dict(totals)


def ask_all(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Sends requests of distinct random shapes, one after another, and looks for those that waited for something.

    After each comes a question that no engine hears of: what is slow there, too, is the machine or the gateway. Processes
    that do next to nothing run meanwhile, and keep when they had to wait.
    """
    chosen = random.Random(arguments.seed)
    generator = np.random.default_rng(arguments.seed)
    failures: list[str] = []
    answered: list[Answered] = []
    without_engine: list[float] = []
    with Stalls() as stalls, Client(url, timeout=CLIENT_TIMEOUT_S, max_retries=0) as client:
        # Pauses of this process are not the server's.
        gc.disable()
        # The connection, and the client's own first time.
        client.add(np.ones(4, np.float32), np.ones(4, np.float32))
        for number in range(arguments.requests):
            asked = draw(chosen, generator, arguments.largest)
            begin = time.monotonic()
            try:
                answer = client.run(asked.op, asked.operands, **asked.options)
            except tilewire.TilewireError as error:
                failures.append(f"{asked.op} {asked.options}: {error}")
                continue
            spent_s = time.monotonic() - begin
            answered.append(Answered(number, spent_s, begin, asked.size, asked.shown(), dict(answer.timings_ms)))
            begin = time.monotonic()
            client.live()
            without_engine.append(time.monotonic() - begin)
    print(f"{len(failures)} failed: {failures[:SHOWN]}")
    return {"asked": arguments.requests, "failed": len(failures), "failures": failures[:SHOWN]} | judge(
        answered, without_engine, stalls
    )


async def burst(url: str, seconds: float) -> dict[str, Any]:
    """Sends requests of one new size after the other over many connections, to a server that has seen none of them.

    Returns:
        Milliseconds by size of the body: of half of the requests, of 99 in 100, of the first on each connection, and the worst.
    """
    results: dict[str, Any] = {}
    for nbytes in BURST_BYTES:
        body = npy_of(np.ones((nbytes // 4096, 1024), np.float32))
        head = f"POST /v1/softmax HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-npy\r\ncontent-length: {len(body)}\r\n\r\n"
        sender = Sender(int(url.rsplit(":", 1)[1]), head.encode() + body, b"")
        seen = await sender.closed_loop(BURST_CONNECTIONS, seconds)
        sender.close()
        latencies_s = seen.latencies_s[200]
        assert set(seen.statuses) == {200}, seen.statuses
        results[str(nbytes)] = row = {
            "p50_ms": seen.percentile_ms(200, 50),
            "p99_ms": seen.percentile_ms(200, 99),
            "first_ms": round(max(latencies_s[:BURST_CONNECTIONS]) * 1e3, 2),
            "worst_ms": round(max(latencies_s) * 1e3, 2),
        }
        print(f"{BURST_CONNECTIONS} connections, {nbytes} bytes: {row}", flush=True)
    return results


def judge(answered: list[Answered], without_engine: list[float], stalls: Stalls) -> dict[str, Any]:
    """Who took much longer than others of the same size, and what else happened then; printed, and as results."""
    spent: dict[str, list[float]] = defaultdict(list)
    for each in answered:
        spent[each.size].append(each.spent_s)
    classes = {name: summary(times) for name, times in sorted(spent.items()) if len(times) >= 10}
    control = summary(without_engine)
    for name, row in [*classes.items(), ("GET /v2/health/live", control)]:
        print(
            f"{name:<24}{row['count']:>6} p50 {row['p50_ms']:8.2f} ms  most {row['most_ms']:8.2f} ms  x{row['ratio']:.1f}"
        )
    num_outliers = int(sum(row["outliers"] for row in classes.values()))
    print(f"{num_outliers} above {OUTLIER:g}x their median; of what no engine hears of, {int(control['outliers'])}")
    print(f"waited {MIN_S * 1e3:g} ms or longer, though they did next to nothing: {stalls.summary()}")

    def ratio(each: Answered) -> float:
        return each.spent_s * 1e3 / classes[each.size]["p50_ms"] if each.size in classes else 0.0

    # All outliers, and some to compare them with.
    latest = [
        each.shown(ratio(each), stalls.longest_s(each.begin_s, each.begin_s + each.spent_s))
        for each in sorted(answered, key=ratio, reverse=True)[: num_outliers + SHOWN]
    ]
    for line in latest:
        print(line)
    return {"classes": classes, "without_engine": control, "machine_stood_still": stalls.summary(), "latest": latest}


def summary(times: list[float]) -> dict[str, float]:
    """Of one size class."""
    p50 = statistics.median(times)
    return {
        "count": len(times),
        "p50_ms": round(p50 * 1e3, 3),
        "most_ms": round(max(times) * 1e3, 3),
        "ratio": round(max(times) / p50, 2),
        "outliers": sum(time_s > OUTLIER * p50 for time_s in times),
    }


def draw(chosen: random.Random, generator: np.random.Generator, largest: int) -> Asked:
    """A request of random op, shape, dtype, layout and options."""
    op = chosen.choice(("matmul", "matmul", "matmul", "softmax", "add"))
    return {"matmul": _matmul, "softmax": _softmax, "add": _add}[op](chosen, generator, largest)


def _length(chosen: random.Random, largest: int) -> int:
    length = int(math.exp(chosen.uniform(0, math.log(largest))))
    return max(1, length // 8 * 8 if chosen.random() < 0.5 else length)


def _array(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    if dtype == "int8":
        return generator.integers(-100, 100, shape, np.int8)
    values = generator.standard_normal(shape, np.float32)
    if dtype.startswith(("bfloat", "float8")):
        import ml_dtypes  # noqa: PLC0415 - only for those who ask for these

        return values.astype(getattr(ml_dtypes, dtype))
    return values.astype(dtype)


def _matmul(chosen: random.Random, generator: np.random.Generator, largest: int) -> Asked:
    m, n, k = (_length(chosen, largest) for _ in range(3))
    dtype = chosen.choice(_DTYPES)
    batch = (chosen.randint(2, 4),) if chosen.random() < 0.15 else ()
    options: dict[str, Any] = {}
    if transpose_a := chosen.random() < 0.25:
        options["transpose_a"] = True
    if transpose_b := chosen.random() < 0.4:
        options["transpose_b"] = True
    operands = {
        "a": _array(generator, (*batch, k, m) if transpose_a else (*batch, m, k), dtype),
        "b": _array(generator, (n, k) if transpose_b else (k, n), dtype),
    }
    if dtype != "int8" and chosen.random() < 0.4:
        options["activation"] = chosen.choice(_ACTIVATIONS)
        operands["bias"] = _array(generator, (n,), chosen.choice(("float32", "float16")))
    if dtype.startswith("float8"):
        operands["a_scale"] = _array(generator, (1,), "float32")
    if chosen.random() < 0.25:
        options["out_dtype"] = chosen.choice(("float32", "float16", "bfloat16"))
    if dtype == "float32":
        options["precision"] = chosen.choice(("ieee", "tf32", "tf32x3"))
    return Asked("matmul", operands, options, _class("matmul", operands, math.prod(batch) * m * n))


def _softmax(chosen: random.Random, generator: np.random.Generator, largest: int) -> Asked:
    rank = chosen.randint(1, 3)
    shape = tuple(_length(chosen, largest if rank < 3 else 64) for _ in range(rank))
    options: dict[str, Any] = {"axis": chosen.randint(-rank, rank - 1), "log": chosen.random() < 0.3}
    operands = {"x": _array(generator, shape, chosen.choice(("float32", "bfloat16", "float16")))}
    if chosen.random() < 0.3:
        options["out_dtype"] = chosen.choice(("float32", "float16", "bfloat16"))
    return Asked("softmax", operands, options, _class("softmax", operands, math.prod(shape)))


def _add(chosen: random.Random, generator: np.random.Generator, largest: int) -> Asked:
    rank = chosen.randint(1, 3)
    shape = tuple(_length(chosen, largest if rank < 3 else 64) for _ in range(rank))
    other = tuple(1 if chosen.random() < 0.25 else extent for extent in shape)
    dtype = chosen.choice(("float32", "bfloat16", "float16"))
    operands = {"a": _array(generator, shape, dtype), "b": _array(generator, other, dtype)}
    return Asked("add", operands, {"alpha": chosen.choice((1, 2, 0.5))}, _class("add", operands, math.prod(shape)))


def _class(op: str, operands: dict[str, Any], num_out: int) -> str:
    """By op and bytes moved, in steps of four."""
    nbytes = sum(operand.nbytes for operand in operands.values()) + 4 * num_out
    step = max(0, math.ceil(math.log(nbytes / 4096, 4)))
    return f"{op} to {4 * 4**step} KiB"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
