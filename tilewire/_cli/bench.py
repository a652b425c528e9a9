"""`tilewire bench URL`: load against any running server, from processes of its own, and what came of it."""

from __future__ import annotations

import math
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console

from tilewire._arrays.dtypes import numpy_dtype
from tilewire._arrays.operands import dtypes_of
from tilewire._cli.session import (
    EXIT_FAILED,
    URL,
    JsonOption,
    KeyOption,
    check_seconds,
    connected,
    dtype_of,
    print_json,
)
from tilewire._clients.client import Client, make_transport
from tilewire._clients.requests import Rules
from tilewire._errors import ConnectionFailed
from tilewire._transport import wire
from tilewire._variables import URL_VARIABLE

PREFIX = "tilewire-bench/"
_NAME_BYTES = 6
TIMEOUT_S = 60.0
# Each is a thread.
MAX_CONNECTIONS = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send.

    Attributes:
        url: Address of the server.
        key: API key.
        op: Op of each request.
        rows: Rows of the operand that travels.
        columns: Its columns, and both dimensions of the resident weight.
        dtype: Name of the dtype.
        connections: Connections that are kept busy.
        seconds: Length of the run.
        weight: Name of the resident weight. Each run has its own, for several may go on at once.
    """

    url: str
    key: str | None
    op: Literal["matmul", "softmax", "add"]
    rows: int
    columns: int
    dtype: str
    connections: int
    seconds: float
    weight: str = field(default_factory=lambda: PREFIX + secrets.token_hex(_NAME_BYTES))

    def call(self) -> wire.Call:
        """Builds the request that is sent again and again."""
        x = np.ones((self.rows, self.columns), np.float32).astype(numpy_dtype(self.dtype))
        operands: dict[str, dict[str, Any]] = {
            "matmul": {"a": x, "b": f"@{self.weight}"},
            "softmax": {"x": x},
            "add": {"a": x, "b": x},
        }
        return Rules().op(self.op, operands[self.op], {}, None).call

    @property
    def flops(self) -> int:
        """Floating-point operations of one request of `matmul`; 0 for other ops."""
        return 2 * self.rows * self.columns**2 if self.op == "matmul" else 0


@dataclass(slots=True)
class Outcome:
    """Results of a load.

    Attributes:
        latencies_ms: Milliseconds of each answered request.
        statuses: Number of answers by status; `broken` for connections without one.
        batch_sizes: Sum of the batch sizes that the server reported.
        seconds: Time that it took.
    """

    latencies_ms: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    batch_sizes: int = 0
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        """Takes in what another connection saw."""
        self.latencies_ms += other.latencies_ms
        self.statuses += other.statuses
        self.batch_sizes += other.batch_sizes
        self.seconds = max(self.seconds, other.seconds)


def bench(
    target: Annotated[
        str,
        typer.Argument(
            envvar=URL_VARIABLE, help="Address of a running server; or the name of a benchmark of a checkout."
        ),
    ] = URL,
    op: Annotated[str, typer.Option(help="matmul (with a resident weight), softmax or add.")] = "matmul",
    rows: Annotated[int, typer.Option(min=1, help="Rows of each request.")] = 16,
    columns: Annotated[int, typer.Option(min=1, help="Columns, and both dimensions of the weight.")] = 1024,
    dtype: Annotated[str, typer.Option(help="Dtype of operands.")] = "float32",
    connections: Annotated[
        int, typer.Option("--connections", "-c", min=1, max=MAX_CONNECTIONS, help="Connections that are kept busy.")
    ] = 8,
    seconds: Annotated[float, typer.Option("--seconds", "-s", help="Length of the run, 0.1 or more.")] = 5.0,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Send load to a running server and print requests per second, latencies and TFLOP/s."""
    with connected(target, key, is_json=is_json) as client:
        if op not in ("matmul", "softmax", "add"):
            raise ValueError(f"--op: {op!r} is none of matmul, softmax, add")
        check_seconds("--seconds", seconds)
        name = dtype_of("--dtype", dtype)
        if name not in dtypes_of(op):
            raise ValueError(f"--dtype: {op} does not take {name}; it takes {', '.join(dtypes_of(op))}")
        load = Load(target, key, op, rows, columns, name, connections, seconds)  # type: ignore[arg-type]
        with _ended_by_signals():
            report = describe(load, measure(client, load))
    if is_json:
        print_json(report)
    else:
        Console().print(sentence(report), soft_wrap=True)
    if set(report["statuses"]) != {"200"}:
        raise typer.Exit(EXIT_FAILED)


def measure(client: Client, load: Load) -> Outcome:
    """Uploads what the load needs, sends it from several processes, and removes it."""
    client.run(load.op, {name: [[1.0]] for name in {"matmul": "ab", "softmax": "x", "add": "ab"}[load.op]})
    if load.op == "matmul":
        client.put(load.weight, np.ones((load.columns, load.columns), np.float32).astype(numpy_dtype(load.dtype)))
    try:
        num_processes = min(load.connections, os.cpu_count() or 1)
        shares = [
            load.connections // num_processes + (i < load.connections % num_processes) for i in range(num_processes)
        ]
        total = Outcome()
        # Spawned: a fork of a process with threads and sockets may stand still.
        context = multiprocessing.get_context("spawn")
        # A terminal sends Ctrl-C to them, too: this process ends them.
        deaf = (signal.SIGINT, signal.SIG_IGN)
        with ProcessPoolExecutor(num_processes, context, initializer=signal.signal, initargs=deaf) as pool:
            for outcome in pool.map(send, [load] * num_processes, shares):
                total.add(outcome)
        return total
    finally:
        if load.op == "matmul":
            client.delete(load.weight)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM and Ctrl-C end the run at once and in order, so that the weight does not stay on the server."""

    def end(number: int, _frame: object) -> None:
        for process in multiprocessing.active_children():
            process.terminate()
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def send(load: Load, num_connections: int) -> Outcome:
    """Keeps connections busy from one process, a thread for each."""
    total = Outcome()
    with ThreadPoolExecutor(num_connections) as pool:
        for outcome in pool.map(send_on_one, [load] * num_connections):
            total.add(outcome)
    return total


def send_on_one(load: Load) -> Outcome:
    """Keeps one connection busy; answers are not decoded."""
    call, outcome = load.call(), Outcome()
    transport = make_transport(load.url, TIMEOUT_S, wire.client_headers(load.key, None), None)
    began_s = time.perf_counter()
    until_s = began_s + load.seconds
    while (sent_s := time.perf_counter()) < until_s:
        try:
            reply = transport.exchange(call)
        except ConnectionFailed:
            outcome.statuses["broken"] += 1
            continue
        outcome.statuses[str(reply.status)] += 1
        if reply.status == 200:
            outcome.latencies_ms.append((time.perf_counter() - sent_s) * 1e3)
            outcome.batch_sizes += int(reply.headers.get("x-batch-size") or 1)
    outcome.seconds = time.perf_counter() - began_s
    transport.close()
    return outcome


def describe(load: Load, outcome: Outcome) -> dict[str, Any]:
    """Returns the report of a run."""
    count = len(outcome.latencies_ms)
    per_s = count / outcome.seconds if outcome.seconds else 0.0
    return {
        "op": load.op,
        "dtype": load.dtype,
        "rows": load.rows,
        "columns": load.columns,
        "connections": load.connections,
        "seconds": round(outcome.seconds, 2),
        "statuses": dict(outcome.statuses),
        "requests_per_s": round(per_s, 1),
        "p50_ms": quantile(outcome.latencies_ms, 0.5),
        "p99_ms": quantile(outcome.latencies_ms, 0.99),
        "mean_batch": round(outcome.batch_sizes / count, 2) if count else None,
        "tflops": round(per_s * load.flops / 1e12, 4) if load.flops else None,
    }


def quantile(values: Sequence[float], share: float) -> float | None:
    """Returns the value below which a share of the values lies; None without values."""
    if not values:
        return None
    return round(sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)], 3)


def sentence(report: dict[str, Any]) -> str:
    """Returns the report as a person reads it."""
    tflops = f", {report['tflops']} TFLOP/s" if report["tflops"] is not None else ""
    failed = {status: count for status, count in report["statuses"].items() if status != "200"}
    trouble = f"\n[red]not answered: {failed}[/red]" if failed else ""
    return (
        f"{report['op']} of {report['rows']}×{report['columns']} {report['dtype']}, {report['connections']} connections, "
        f"{report['seconds']} s: [bold]{report['requests_per_s']:,} requests/s[/bold], p50 {report['p50_ms']} ms, "
        f"p99 {report['p99_ms']} ms, {report['mean_batch']} requests per launch{tflops}{trouble}"
    )
