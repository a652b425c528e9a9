"""What a gateway alone costs: requests on kept connections, against an engine that answers at once and computes nothing.

    python -m benchmarks.bench_gateway --connections 1 8 --rows 1 16

Owns the engine and the load, which runs in a process of its own; the gateway's server is the real one, in this process, on
one thread. Each request is measured with the same head each time, with an id of its own, with another header each time that
nobody reads, and with another origin, which makes it a head that was never seen. Prints CPU microseconds of that thread for
each request, requests per second and latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import multiprocessing
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.command import out_folder
from benchmarks.idle_engine import make_idle_server
from benchmarks.machine import describe
from tilewire.service.supervisor import child

SIZE = 4096
HEADS = {"another": "Origin", "unread": "X-Number", "an own id": "X-Request-Id", "the same": ""}
SEGMENT_BYTES = 2**28
WARM_S = 0.5


@dataclass(frozen=True)
class Cost:
    """One measurement.

    Attributes:
        rows: Of each body, with 4096 float16 numbers each.
        connections: Kept busy.
        head: What is new in each request's: of `HEADS`.
        cpu_us: Of the gateway's thread, for each request.
        per_s: Requests per second.
        p50_us: Half of the latencies are below.
        p99_us: All but a hundredth are below.
    """

    rows: int
    connections: int
    head: str
    cpu_us: float
    per_s: float
    p50_us: float
    p99_us: float


def npy_of(rows: int) -> bytes:
    """The body of a request."""
    file = io.BytesIO()
    np.save(file, np.zeros((rows, SIZE), np.float16))
    return file.getvalue()


class Line:
    """One connection and its request under way."""

    def __init__(self, port: int, body: bytes, number: int, head: str) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._body = body
        self._header = HEADS[head]
        self._ids = itertools.count(number * 10**9)
        self._left = 0
        self._sent_ns = 0

    def send(self) -> None:
        """Sends the next request."""
        name = f"{self._header}: {next(self._ids):012}\r\n" if self._header else ""
        head = (
            f"POST /v1/matmul?b=@w HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-npy\r\n{name}"
            f"Content-Length: {len(self._body)}\r\n\r\n"
        )
        self._sent_ns = time.perf_counter_ns()
        self.sock.sendall(head.encode("ascii") + self._body)

    def receive(self) -> int:
        """Takes what has come; returns how long the request took, in nanoseconds, once its answer is whole."""
        piece = self.sock.recv(2**18)
        assert piece, "the gateway closed the connection"
        if not self._left:
            head, _, rest = piece.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            self._left = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]) - len(rest)
        else:
            self._left -= len(piece)
        return 0 if self._left else time.perf_counter_ns() - self._sent_ns


def keep_busy(port: int, case: tuple[int, int, str], seconds: float, told: Connection) -> None:
    """The load: sends when to begin counting and then the latencies."""
    rows, connections, head = case
    lines = [Line(port, npy_of(rows), number, head) for number in range(connections)]
    by_fd = {line.sock.fileno(): line for line in lines}
    poll = select.epoll()
    for fd, line in by_fd.items():
        poll.register(fd, select.EPOLLIN)
        line.send()
    latencies: list[int] = []
    began_s = time.monotonic()
    is_warm = False
    while (passed_s := time.monotonic() - began_s) < WARM_S + seconds:
        if not is_warm and passed_s > WARM_S:
            is_warm = True
            latencies.clear()
            told.send(None)
        for fd, _ in poll.poll():
            if took_ns := by_fd[fd].receive():
                latencies.append(took_ns)
                by_fd[fd].send()
    told.send(latencies)


async def measure(listener: socket.socket, case: tuple[int, int, str], seconds: float, told: Connection) -> Cost:
    """Serves one load on this thread."""
    server = make_idle_server(SEGMENT_BYTES)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()
    loop.add_reader(told.fileno(), heard.set)
    await heard.wait()
    told.recv()
    heard.clear()
    child.freeze_objects()
    cpu_s = time.thread_time()
    await heard.wait()
    cpu_s = time.thread_time() - cpu_s
    loop.remove_reader(told.fileno())
    # The loop made it non-blocking, and the list is longer than a pipe holds.
    os.set_blocking(told.fileno(), True)
    latencies = sorted(told.recv())
    server.should_exit = True
    await serving
    count = len(latencies)
    rows, connections, head = case
    return Cost(
        rows,
        connections,
        head,
        cpu_us=round(cpu_s / count * 1e6, 1),
        per_s=round(count / seconds),
        p50_us=round(latencies[count // 2] / 1e3, 1),
        p99_us=round(latencies[count * 99 // 100] / 1e3, 1),
    )


def cost_of(case: tuple[int, int, str], seconds: float) -> Cost:
    """Measures one load."""
    import uvloop  # noqa: PLC0415

    context = multiprocessing.get_context("fork")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        hears, tells = context.Pipe(duplex=False)
        load = context.Process(target=keep_busy, args=(listener.getsockname()[1], case, seconds, tells))
        load.start()
        cost = uvloop.run(measure(listener, case, seconds, hears))
        load.join()
    return cost


def run(argv: Sequence[str]) -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(prog="bench_gateway", description=__doc__)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=out_folder, help="folder for gateway.json")
    arguments = parser.parse_args(argv)
    cases = list(itertools.product(arguments.rows, arguments.connections, HEADS))
    print(f"{'rows':>5} {'connections':>11} {'head':>10} {'CPU µs':>7} {'req/s':>7} {'p50 µs':>7} {'p99 µs':>7}")
    costs = []
    for case in cases:
        cost = cost_of(case, arguments.seconds)
        print(
            f"{cost.rows:>5} {cost.connections:>11} {cost.head:>10} "
            f"{cost.cpu_us:>7} {cost.per_s:>7} {cost.p50_us:>7} {cost.p99_us:>7}",
            flush=True,
        )
        costs.append(asdict(cost))
    if arguments.out is not None:
        found = {**describe({}, "benchmarks.bench_gateway", argv), "costs": costs}
        (arguments.out / "gateway.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
