"""Overload: what is computed, how soon the rest is refused, and what another API key notices.

    python -m benchmarks.bench_overload --seconds 10 --out benchmarks/results

Two keys share a service on the CPU. First the flood alone, in a closed loop: its peak. Then requests of the flood come at four
times that rate, answered or not, while the quiet key sends one at a time. Every answer of status 200 is checked. The service
has all cores but one, the client has the last one. A latency counts from the moment at which a request was due.

The peak is measured again behind the flood. Where both differ by more than a quarter, something else had the cores at one of
the two times, and the flood was not at four times the peak: all is measured anew, five times at most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.machine import describe
from tilewire import Client
from tilewire.service.cli.launch import running_server
from tilewire.service.keys import digest_of, make_key

WEIGHT = "weight"
# More connections than a gateway admits requests, so that it has some to refuse.
MAX_IN_FLIGHT = 64
# Greatest ratio of the peaks before and behind the flood, and the number of times that all is measured for that.
STEADY, ROUNDS = 1.25, 5
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Work:
    """Requests to send: x (rows, inner) times a resident (inner, columns), float32.

    Attributes:
        rows: Rows of x.
        inner: Columns of x.
        columns: Columns of the weight.
    """

    rows: int = 15
    inner: int = 1024
    columns: int = 8192


@dataclass
class Seen:
    """What one key saw.

    Attributes:
        statuses: Number of answers by status.
        wrong: Number of answers of status 200 that were not the product.
        latencies_s: Seconds of each answer, by status.
        seconds: Length of the run.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    latencies_s: dict[int, list[float]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, status: int, latency_s: float, *, is_right: bool) -> None:
        """Counts an answer."""
        self.statuses[status] += 1
        self.wrong += not is_right
        self.latencies_s.setdefault(status, []).append(latency_s)

    def percentile_ms(self, status: int, percent: float) -> float | None:
        """Latency of a share of the answers of one status, in ms."""
        found = self.latencies_s.get(status)
        return round(float(np.percentile(found, percent)) * 1e3, 2) if found else None

    @property
    def per_s(self) -> float:
        """Products per second."""
        return self.statuses[200] / self.seconds

    def shown(self) -> dict[str, Any]:
        """Figures of the report."""
        return {
            "products_per_s": round(self.per_s, 1),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "wrong": self.wrong,
            "ms_200": [self.percentile_ms(200, percent) for percent in (50, 99)],
            "ms_429": [self.percentile_ms(429, percent) for percent in (50, 99)],
        }


class Connection(asyncio.Protocol):
    """One connection of the client; one request at a time.

    Args:
        sent: Bytes of every request.
        expected: Body of the right answer.

    Attributes:
        is_over: The server closes it behind the last answer.
    """

    def __init__(self, sent: bytes, expected: bytes) -> None:
        self.is_over = False
        self._sent, self._expected = sent, expected
        self._received = bytearray()
        self._need = 0
        self._answer: asyncio.Future[tuple[int, bool]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's call."""
        assert isinstance(transport, asyncio.Transport), "This is a bug."
        self._transport = transport

    async def ask(self) -> tuple[int, bool]:
        """Sends a request; returns the status, and whether a result is right."""
        assert self._transport is not None, "This is a bug."
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(self._sent)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        """Asyncio's call."""
        received = self._received
        received += data
        if not self._need:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return
            found = _LENGTH.search(received, 0, end + 2)
            self._need = end + 4 + (int(found[1]) if found else 0)
            self.is_over = b"\r\nconnection: close" in received[:end]
        if len(received) < self._need:
            return
        status = int(received[9:12])
        is_right = status != 200 or received.endswith(self._expected)
        self._received, self._need = bytearray(), 0
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result((status, is_right))

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's call."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()


class Sender:
    """All connections of one key.

    Args:
        port: Port of the service.
        sent: Bytes of every request.
        expected: Body of the right answer.
    """

    def __init__(self, port: int, sent: bytes, expected: bytes) -> None:
        self._port, self._sent, self._expected = port, sent, expected
        self._idle: deque[Connection] = deque()
        self._all: list[Connection] = []

    async def open(self, count: int) -> None:
        """Opens connections until there are `count`."""
        while len(self._idle) < count:
            self._idle.append(await self._connect())

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, one = await loop.create_connection(lambda: Connection(self._sent, self._expected), "127.0.0.1", self._port)
        self._all.append(one)
        return one

    async def _ask(self, seen: Seen, due_s: float) -> None:
        """Sends a request over an idle connection, and counts its answer from the time at which it was due."""
        one = self._idle.popleft()
        status, is_right = await one.ask()
        seen.add(status, time.perf_counter() - due_s, is_right=is_right)
        if one.is_over:
            self._all.remove(one)
            one.close()
            one = await self._connect()
        self._idle.append(one)

    async def closed_loop(self, connections: int, seconds: float, pause_s: float = 0.0) -> Seen:
        """Each connection sends its next request when it has an answer, and `pause_s` later."""
        await self.open(connections)
        seen, end_s = Seen(), time.perf_counter() + seconds

        async def work() -> None:
            while (began_s := time.perf_counter()) < end_s:
                await self._ask(seen, began_s)
                await asyncio.sleep(pause_s)

        began_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(connections)))
        seen.seconds = time.perf_counter() - began_s
        return seen

    async def open_loop(self, per_s: float, connections: int, seconds: float) -> Seen:
        """Sends at a rate, whatever is answered. A request that finds no connection idle waits for one, and is then late."""
        await self.open(connections)
        seen, began_s, tasks = Seen(), time.perf_counter(), set()
        slots = asyncio.Semaphore(connections)

        async def send(due_s: float) -> None:
            await self._ask(seen, due_s)
            slots.release()

        for number in range(math.ceil(per_s * seconds)):
            due_s = began_s + number / per_s
            if (early_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(early_s)
            await slots.acquire()
            tasks.add(asyncio.ensure_future(send(due_s)))
        seen.seconds = time.perf_counter() - began_s
        done = seen.statuses.copy()
        await asyncio.gather(*tasks)
        # What was answered behind the end counts as answered, and not for the rate.
        seen.seconds *= seen.statuses[200] / max(1, done[200])
        return seen

    def close(self) -> None:
        """Closes every connection."""
        for one in self._all:
            one.close()


def request_of(key: str, body: bytes) -> bytes:
    """Bytes of one product."""
    head = (
        f"POST /v1/matmul?b=@{WEIGHT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/x-npy\r\naccept: application/x-npy\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def peak_of(flood: Sender, seconds: float) -> Seen:
    """Measures a closed loop of few connections and one of more, and returns the faster one."""
    seen = [await flood.closed_loop(connections, seconds / 2) for connections in (8, 32)]
    return max(seen, key=lambda one: one.per_s)


async def measure(port: int, keys: Sequence[str], work: Work, seconds: float, factor: float) -> dict[str, Any]:
    """Runs both loads.

    Args:
        port: Port of the service.
        keys: Keys of the flood and of the quiet one.
        work: What is sent.
        seconds: Length of each load.
        factor: Rate of the flood in peaks.

    Returns:
        Figures of the peak before and behind the flood, of the flood, and of the quiet key alone and beside it. `goodput` is a
        share of the mean of both peaks. `rounds` is the number of times that all was measured, `is_steady` whether the peaks of
        the last time agree.
    """
    file = io.BytesIO()
    np.save(file, np.ones((work.rows, work.inner), np.float32))
    product = np.full((work.rows, work.columns), work.inner, np.float32).tobytes()
    flood, quiet = (Sender(port, request_of(key, file.getvalue()), product) for key in keys)
    try:
        await flood.closed_loop(8, 1.0)
        rounds, is_steady = 0, False
        while not is_steady and rounds < ROUNDS:
            rounds += 1
            peak = await peak_of(flood, seconds)
            alone = await quiet.closed_loop(1, seconds / 2, 0.02)
            beside = asyncio.ensure_future(quiet.closed_loop(1, seconds, 0.02))
            flooded = await flood.open_loop(factor * peak.per_s, 4 * MAX_IN_FLIGHT, seconds)
            quiet_beside = await beside
            peak_behind = await peak_of(flood, seconds)
            is_steady = 1 / STEADY <= peak_behind.per_s / peak.per_s <= STEADY
        return {
            "rounds": rounds,
            "is_steady": is_steady,
            "peak": peak.shown(),
            "peak_behind": peak_behind.shown(),
            "flood": flooded.shown(),
            "goodput": round(2 * (flooded.per_s + quiet_beside.per_s) / (peak.per_s + peak_behind.per_s), 3),
            "quiet_alone": alone.shown(),
            "quiet": quiet_beside.shown(),
        }
    finally:
        flood.close()
        quiet.close()


@contextlib.contextmanager
def on_other_cores() -> Iterator[None]:
    """Leaves the last core to this process; what is started inside has the others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[:-1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark with command-line arguments `argv`; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="as in tilewire serve")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each load")
    parser.add_argument("--factor", type=float, default=4.0, help="rate of the flood in peaks")
    for name, value in asdict(Work()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{name} of the operands")
    parser.add_argument("--out", type=Path, help="folder for overload.json")
    given = parser.parse_args(argv)
    load_average = os.getloadavg()[0]
    work = Work(given.rows, given.inner, given.columns)
    keys = [make_key(), make_key()]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder, "keys.toml")
        path.touch(0o600)
        rights = 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]\n'
        names = zip(("flood", "quiet"), keys, strict=True)
        entries = [f'[[keys]]\nname = "{name}"\nsha256 = "{digest_of(key)}"\n{rights}' for name, key in names]
        path.write_text("".join(entries))
        flags = ("--gateways", "1", "--max-in-flight", str(MAX_IN_FLIGHT), "--api-keys-file", str(path))
        with on_other_cores():
            url = stack.enter_context(running_server("--device", given.device, *flags))
        identity = httpx.get(f"{url}/v2", headers={"x-api-key": keys[0]}).json()
        machine = describe(identity, "benchmarks.bench_overload", argv)
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
        with Client(url, api_key=keys[0]) as client:
            client.put(WEIGHT, np.ones((work.inner, work.columns), np.float32))
        port = int(url.rsplit(":", 1)[1])
        figures = asyncio.run(measure(port, keys, work, given.seconds, given.factor))
    report = {
        **machine,
        "load_average": load_average,
        "work": asdict(work),
        "factor": given.factor,
        **figures,
    }
    print(json.dumps(report, indent=1))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "overload.json").write_text(json.dumps(report, indent=1) + "\n")
    wrong = sum(figures[name]["wrong"] for name in ("peak", "peak_behind", "flood", "quiet_alone", "quiet"))
    return 1 if wrong or set(figures["quiet"]["statuses"]) != {"200"} else 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
