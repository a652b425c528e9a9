"""How close a client on the same host comes to the speed of the bus: one product, operands and result in registered regions.

    python -m benchmarks.bench_shared_memory --device cuda:0 --out benchmarks/results

Beside it, in the same run: the time that the bus needs for the same bytes from and to pinned memory, the same bytes as a binary
request body, and the same bytes over HTTP to a 20-line FastAPI + torch server. Owns the questions and the report. Everything
is on one machine; one request at a time.
"""

from __future__ import annotations

import argparse
import datetime as dt
import http.client
import json
import mmap
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import ml_dtypes
import numpy as np
import torch

from benchmarks.command import out_folder
from tilewire.service.cli.launch import running_server

SHM = Path("/dev/shm")
ITEM_BYTES = 2
WARM_UP = 10
CHECKED_ROWS = 4
START_TIMEOUT_S = 120.0
INFER = "/v2/models/matmul/infer"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Row:
    """One way to have the product computed.

    Attributes:
        way: What it is.
        p50_ms: Latency as the client sees it; likewise p99.
        p99_ms: See above.
        stages_ms: Medians of the stages that the server tells, or of the two directions of the bus.
    """

    way: str
    p50_ms: float
    p99_ms: float
    stages_ms: dict[str, float]


class SharedObject:
    """A shared-memory object of this process, mapped."""

    def __init__(self, nbytes: int) -> None:
        self.path = SHM / f"tilewire-bench-{os.getpid()}-{os.urandom(4).hex()}"
        with self.path.open("xb+") as file:
            # Room for all of it, or an error now: a write without room ends the process.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._map = mmap.mmap(file.fileno(), nbytes)
        self.view = memoryview(self._map)
        self.nbytes = nbytes

    def unlink(self) -> None:
        """Takes its name away."""
        self.path.unlink(missing_ok=True)


class Client:
    """One kept-alive connection.

    Args:
        url: The server's address.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, body: object, headers: dict[str, str]) -> tuple[bytes, str]:
        """Posts; returns the answer's body and its `Server-Timing`."""
        self._connection.request("POST", path, body, headers)  # type: ignore[arg-type]
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != http.client.OK:
            raise SystemExit(f"{path}: {answer.status} {content[:500]!r}")
        return content, answer.headers.get("server-timing", "")


class Question:
    """The product, its operands and what must come out.

    Args:
        size: Rows and columns of each operand.
    """

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(0)
        self.size = size
        self.a, self.b = (rng.standard_normal((size, size), np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
        self.nbytes = size * size * ITEM_BYTES
        self._expected = self.a[:CHECKED_ROWS].astype(np.float32) @ self.b.astype(np.float32)

    def check(self, out: bytes | memoryview) -> None:
        """Compares the first rows of a result with float32's."""
        got = np.frombuffer(out, ml_dtypes.bfloat16, CHECKED_ROWS * self.size).reshape(CHECKED_ROWS, -1)
        bound = 0.01 * np.abs(self._expected) + 1e-2 * np.sqrt(self.size)
        if not (np.abs(got.astype(np.float32) - self._expected) <= bound).all():
            raise SystemExit("a result is wrong")


def measure(way: str, requests: int, call: Callable[[], str]) -> Row:
    """Times a call again and again."""
    for _ in range(WARM_UP):
        call()
    times, stages = [], []
    for _ in range(requests):
        began_s = time.perf_counter()
        timing = call()
        times.append((time.perf_counter() - began_s) * 1e3)
        stages.append(parse_timing(timing))
    names = stages[0]
    medians = {name: float(np.median([one.get(name, 0.0) for one in stages])) for name in names}
    return Row(way, float(np.median(times)), float(np.percentile(times, 99)), medians)


def parse_timing(header: str) -> dict[str, float]:
    """Reads `Server-Timing`."""
    pairs = (entry.split(";dur=") for entry in header.split(", ") if ";dur=" in entry)
    return {name: float(value) for name, value in pairs}


def over_regions(url: str, question: Question, requests: int) -> Row:
    """Operands and result in one registered object."""
    client = Client(url)
    shared = SharedObject(3 * question.nbytes)
    try:
        shared.view[: question.nbytes] = question.a.tobytes()
        shared.view[question.nbytes : 2 * question.nbytes] = question.b.tobytes()
        registration = json.dumps({"key": f"/{shared.path.name}", "offset": 0, "byte_size": shared.nbytes})
        client.post("/v2/systemsharedmemory/region/bench/register", registration, JSON)
        body = json.dumps(infer_request(question, in_regions=True))
        row = measure("shared memory", requests, lambda: client.post(INFER, body, JSON)[1])
        question.check(shared.view[2 * question.nbytes :])
        client.post("/v2/systemsharedmemory/region/bench/unregister", b"", {})
    finally:
        shared.unlink()
    return row


def over_bodies(url: str, question: Question, requests: int) -> Row:
    """The same as a binary request and a binary answer."""
    client = Client(url)
    head = json.dumps(infer_request(question, in_regions=False)).encode()
    body = head + question.a.tobytes() + question.b.tobytes()
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(head))}
    row = measure("binary bodies", requests, lambda: client.post(INFER, body, headers)[1])
    question.check(memoryview(client.post(INFER, body, headers)[0])[-question.nbytes :])
    return row


def infer_request(question: Question, *, in_regions: bool) -> dict[str, object]:
    """The JSON of the request."""

    def place(number: int) -> dict[str, object]:
        if not in_regions:
            return {"binary_data_size": question.nbytes}
        return {
            "shared_memory_region": "bench",
            "shared_memory_byte_size": question.nbytes,
            "shared_memory_offset": number * question.nbytes,
        }

    shape = [question.size, question.size]
    inputs = [
        {"name": name, "datatype": "BF16", "shape": shape, "parameters": place(number)}
        for number, name in enumerate("ab")
    ]
    out = place(2) if in_regions else {"binary_data": True}
    return {"inputs": inputs, "outputs": [{"name": "out", "parameters": out}]}


def over_twenty_lines(question: Question, requests: int) -> Row:
    """The same bytes to and from what people write today."""
    with twenty_lines() as url:
        client = Client(url)
        path = f"/matmul/{question.size}/{question.size}/{question.size}"
        body = question.a.tobytes() + question.b.tobytes()
        headers = {"content-type": "application/octet-stream"}
        row = measure("20 lines of FastAPI + torch", requests, lambda: client.post(path, body, headers)[1])
        question.check(client.post(path, body, headers)[0])
    return row


@contextmanager
def twenty_lines() -> Iterator[str]:
    """The 20-line server on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    module = "benchmarks.twenty_lines_pair:app"
    command = [sys.executable, "-m", "uvicorn", module, "--port", str(port), "--log-level", "warning"]
    with subprocess.Popen(command) as process:
        try:
            end_s = time.monotonic() + START_TIMEOUT_S
            while not is_listening(port):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit("the 20-line server did not start")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def is_listening(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def floor(size: int, device: str, rounds: int) -> Row:
    """What the bus needs for two operands in and one result out, from and to pinned memory, one direction at a time."""
    nbytes = size * size * ITEM_BYTES
    host = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    torch.cuda.set_device(device)
    times: dict[str, list[float]] = {"h2d": [], "d2h": []}
    for _ in range(rounds + WARM_UP):
        for way, into, source in (("h2d", there, host), ("d2h", host[:nbytes], there[:nbytes])):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            into.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times[way].append((time.perf_counter() - began_s) * 1e3)
    medians = {way: float(np.median(all_[WARM_UP:])) for way, all_ in times.items()}
    both = [sum(pair) for pair in zip(times["h2d"][WARM_UP:], times["d2h"][WARM_UP:], strict=True)]
    return Row("the bus alone, pinned memory", float(np.median(both)), float(np.percentile(both, 99)), medians)


def floor_in_its_own_process(size: int, device: str, rounds: int) -> Row:
    """The floor, measured by a process that is gone before the servers start."""
    command = [sys.executable, "-m", "benchmarks.bench_shared_memory", "--floor", "--size", str(size)]
    command += ["--device", device, "--requests", str(rounds)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Row(**json.loads(shown.splitlines()[-1]))


def run(argv: list[str]) -> int:
    """Runs every way; prints rows and ratios, writes JSON."""
    parser = argparse.ArgumentParser(prog="bench shared_memory", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--floor", action="store_true", help="only measure the bus, and print it as JSON")
    parser.add_argument("--out", type=out_folder)
    parser.add_argument("flags", nargs="*", help="further flags of `tilewire serve`, after --")
    arguments = parser.parse_args(argv)
    if arguments.floor:
        print(json.dumps(asdict(floor(arguments.size, arguments.device, arguments.requests))))
        return 0
    rows = []
    if torch.cuda.is_available() and not arguments.device.startswith("cpu"):
        device = "cuda:0" if arguments.device == "auto" else arguments.device
        rows.append(floor_in_its_own_process(arguments.size, device, arguments.requests))
    question = Question(arguments.size)
    flags = ["--device", arguments.device, "--allow-shared-memory", "--gateways", "1", *arguments.flags]
    with running_server(*flags) as url:
        engines = json.loads(get(url, "/v2"))
        rows.append(over_regions(url, question, arguments.requests))
        rows.append(over_bodies(url, question, arguments.requests))
    rows.append(over_twenty_lines(question, max(5, arguments.requests // 10)))
    report(rows)
    if arguments.out is not None:
        write(arguments.out, rows, engines, arguments)
    return 0


def get(url: str, path: str) -> bytes:
    """The body of a GET."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("GET", path)
    return connection.getresponse().read()


def report(rows: Sequence[Row]) -> None:
    """Prints each way, and how it compares."""
    (ours,) = (row for row in rows if row.way == "shared memory")
    for row in rows:
        stages = "  ".join(f"{name} {value:.3f}" for name, value in row.stages_ms.items())
        print(f"{row.way:<30} p50 {row.p50_ms:>9.3f} ms  p99 {row.p99_ms:>9.3f} ms  {stages}")
    for row in rows:
        if row is not ours:
            print(f"shared memory takes {ours.p50_ms / row.p50_ms:.3f}× the time of: {row.way}")


def write(folder: Path, rows: Sequence[Row], server: dict[str, object], arguments: argparse.Namespace) -> None:
    """Writes what was measured, with what it was measured on."""
    engines = server["engines"]
    assert isinstance(engines, list), "This is a bug."
    name = str(engines[0]["device_name"])
    content = {
        "question": f"a {arguments.size}³ bf16 product, operands and result in registered shared memory, one client",
        "device": name,
        "backend": engines[0]["backend"],
        "versions": {
            "tilewire": server["version"],
            "python": platform.python_version(),
            "torch": engines[0]["torch"],
            "triton": engines[0]["triton"],
        },
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": f"python -m benchmarks.bench_shared_memory --device {arguments.device} --size {arguments.size} "
        f"--requests {arguments.requests}",
        "rows": [asdict(row) for row in rows],
    }
    path = folder / f"shared_memory-{name.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
