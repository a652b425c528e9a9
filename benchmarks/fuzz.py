"""Sends mutated requests through sockets, parser and codecs together: no crash, no 500, no hang, no growth, no foreign byte.

    python -m benchmarks.fuzz --requests 1000000 --out fuzz.json

- Framed requests, nine of ten: mutated bodies with their right length, pipelined on a kept connection. A good request stands
  behind them, whose answer is compared. Their ids must come back in order.
- Raw requests, one of ten: any byte is mutated, on a connection of its own that we end behind it.

Good requests carry a mark that no mutated one has: an answer to a mutated one that shows it has somebody else's bytes. The seed
and the number of workers repeat a run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from benchmarks.soak_calls import CALLS, Call, Rng, integers, upload
from tests.support.live_server import LiveServer, serving
from tests.support.oip_bodies import to_text
from tests.support.raw_http import ConnectionEnded, RawConnection, post
from tests.support.tensor_bodies import from_safetensors, to_npy, to_npz, to_safetensors

FLAGS = (
    *("--gateways", "2", "--arena-bytes", "128MiB", "--max-body-bytes", "8MiB", "--max-result-bytes", "8MiB"),
    "--allow-shared-memory",
)
MARK = np.frombuffer(b"TWFOREIG", np.int64)
GOOD = to_safetensors({"a": np.repeat(MARK, 512), "b": np.zeros(1, np.int64)})
TIMEOUT_S = 20.0
BATCH, RAW_EVERY = 16, 10
MAX_KEPT, MAX_MUTATIONS = 20, 8
# What a process may grow by over the second half, while it is fuzzed: less than a byte for each request of a long run.
MAX_GROWTH_BYTES = 16 * 2**20
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
NUMBERS = (
    b"0",
    b"-1",
    b"1",
    b"2147483648",
    b"9223372036854775807",
    b"18446744073709551616",
    b"1e999",
    b"NaN",
    b"null",
    b"[]",
    b"true",
)
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x0D, 0x20, 0x22, 0x2C, 0x5B, 0x7B, 0x7D)


@dataclass
class Outcome:
    """What one worker saw.

    Attributes:
        num_requests: Mutated requests that were sent.
        num_compared: Good requests whose answers were compared.
        statuses: Answers by status.
        problems: 500s, hangs, foreign bytes, answers out of order.
    """

    num_requests: int = 0
    num_compared: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def _flip(rng: Rng, data: bytearray) -> None:
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))


def _set(rng: Rng, data: bytearray) -> None:
    data[int(rng.integers(len(data)))] = INTERESTING[int(rng.integers(len(INTERESTING)))]


def _insert(rng: Rng, data: bytearray) -> None:
    at = int(rng.integers(len(data) + 1))
    data[at:at] = rng.bytes(int(rng.integers(1, 9)))


def _delete(rng: Rng, data: bytearray) -> None:
    at = int(rng.integers(len(data)))
    del data[at : at + int(rng.integers(1, 9))]


def _repeat(rng: Rng, data: bytearray) -> None:
    at, nbytes = int(rng.integers(len(data))), int(rng.integers(1, 65))
    data[at:at] = data[at : at + nbytes] * int(rng.integers(1, 4))


def _truncate(rng: Rng, data: bytearray) -> None:
    del data[int(rng.integers(len(data))) :]


def _number(rng: Rng, data: bytearray) -> None:
    found = list(re.finditer(rb"\d+", bytes(data[:2000])))
    if found:
        place = found[int(rng.integers(len(found)))]
        data[place.start() : place.end()] = NUMBERS[int(rng.integers(len(NUMBERS)))]


MUTATIONS: tuple[Callable[[Rng, bytearray], None], ...] = (
    _flip,
    _set,
    _insert,
    _delete,
    _repeat,
    _truncate,
    _number,
    _number,
)


def mutate(rng: Rng, data: bytes) -> bytes:
    """A few mutations, one after the other."""
    changed = bytearray(data)
    for _ in range(min(int(rng.geometric(0.6)), MAX_MUTATIONS)):
        if changed:
            MUTATIONS[int(rng.integers(len(MUTATIONS)))](rng, changed)
    return bytes(changed)


def corpus(rng: Rng) -> list[tuple[bytes, bytes]]:
    """Heads without a length, and bodies, to mutate: every format, both protocols."""
    a, b = integers(rng, (3, 4)), integers(rng, (4, 2))
    pair = {"a": a, "b": b}
    calls = [maker(rng) for maker in CALLS for _ in range(3)]
    found = [_split(call) for call in calls if call.data.startswith(b"POST") and len(call.data) < 2**14]
    for target, body, kind in (
        ("/v1/matmul", to_npz(pair, is_deflated=True), "application/x-npz"),
        ("/v1/softmax", to_npy(np.asfortranarray(a)), "application/octet-stream"),
        ("/v1/softmax?axis=0&log=true", to_npy(a.astype(">f4")), "application/x-npy"),
        ("/v2/models/matmul/infer", to_text(pair, parameters={"activation": "relu"}), "application/json"),
        (
            "/v1/add",
            json.dumps({"a": [[1, 2], [3, 4]], "b": [1.5, -2e3], "dtype": "float32"}).encode(),
            "application/json",
        ),
    ):
        found.append((_bare("POST", target, kind), body))
    packed = gzip.compress(to_text(pair))
    found.append((_bare("POST", "/v2/models/matmul/infer", "application/json", "content-encoding: gzip\r\n"), packed))
    found += [(_bare("PUT", f"/v1/tensors/fuzz-{number}", "application/x-npy"), to_npy(a)) for number in range(4)]
    return found


def _bare(method: str, target: str, content_type: str, rest: str = "") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nhost: fuzz\r\ncontent-type: {content_type}\r\n{rest}".encode()


def _split(call: Call) -> tuple[bytes, bytes]:
    """A call's head without its length, and its body."""
    lines = call.data[: call.body_at - 2].split(b"\r\n")
    kept = [line for line in lines if line and not line.startswith(b"content-length")]
    return b"\r\n".join(kept) + b"\r\n", call.data[call.body_at :]


class Worker:
    """Sends mutated requests to one server until it has sent so many."""

    def __init__(self, address: tuple[str, int], seed: int) -> None:
        self._address = address
        self._rng: Rng = np.random.default_rng(seed)
        self._corpus = corpus(self._rng)
        self._connection: RawConnection | None = None
        self.outcome = Outcome()

    def run(self, num_requests: int) -> Outcome:
        """Sends."""
        outcome = self.outcome
        while outcome.num_requests < num_requests and len(outcome.problems) < MAX_KEPT:
            try:
                if self._rng.integers(RAW_EVERY) == 0:
                    for _ in range(BATCH):
                        self._raw()
                else:
                    self._framed()
            except TimeoutError:
                self._problem("a hang", b"")
        self._close()
        return outcome

    def _draw(self) -> tuple[bytes, bytes]:
        return self._corpus[int(self._rng.integers(len(self._corpus)))]

    def _framed(self) -> None:
        """A batch of mutated bodies, and a good request behind them."""
        if self._connection is None:
            self._connection = RawConnection(socket.create_connection(self._address, timeout=TIMEOUT_S))
        first, sent = self.outcome.num_requests, []
        for number in range(first, first + BATCH):
            begin, body = self._draw()
            body = mutate(self._rng, body)
            lines = b"x-request-id: f-%d\r\ncontent-length: %d\r\n\r\n" % (number, len(body))
            sent.append(begin + lines + body)
        self.outcome.num_requests += BATCH
        self._connection.send(
            b"".join(sent) + post("/v1/add", GOOD, x_request_id="good", content_type="application/x-safetensors")
        )
        data = b""
        try:
            for number, data in enumerate(sent, first):
                answer = self._connection.answer()
                self._judge(answer.status, answer.body, data)
                if answer.headers.get("x-request-id") != f"f-{number}":
                    self._problem(f"the id of another: {answer.headers}", data)
                if answer.headers.get("connection") == "close":
                    self._close()
                    return
            answer = self._connection.answer()
        except (ConnectionEnded, ConnectionResetError, BrokenPipeError):
            self._problem("a connection ended without an answer", data)
            self._close()
            return
        self.outcome.num_compared += 1
        if answer.status != 200 or not np.array_equal(from_safetensors(answer.body)["out"], np.repeat(MARK, 512)):
            self._problem(f"a good request was answered {answer.status} {answer.body[:100]!r}", data)

    def _raw(self) -> None:
        """One request with any bytes mutated, and the end of what we send."""
        begin, body = self._draw()
        data = mutate(self._rng, begin + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.outcome.num_requests += 1
        with socket.create_connection(self._address, timeout=TIMEOUT_S) as sock:
            got = b""
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while piece := sock.recv(2**16):
                    got += piece
            except (ConnectionResetError, BrokenPipeError, OSError) as error:
                if isinstance(error, TimeoutError):
                    self._problem("a hang", data)
        for status in STATUS.findall(got):
            self._judge(int(status), got, data)

    def _judge(self, status: int, body: bytes, data: bytes) -> None:
        self.outcome.statuses[status] += 1
        if status >= 500:
            self._problem(f"{status}: {body[:200]!r}", data)
        if MARK.tobytes() in body:
            self._problem("foreign bytes", data)

    def _problem(self, what: str, data: bytes) -> None:
        self.outcome.problems.append(f"{what} after {data[:600]!r}")
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.sock.close()
            self._connection = None


def work(address: tuple[str, int], seed: int, num_requests: int) -> Outcome:
    """One worker's run, in a process of its own."""
    return Worker(address, seed).run(num_requests)


def fuzz(server: LiveServer, num_requests: int, num_workers: int, seed: int) -> dict[str, object]:
    """Runs all workers; returns the report."""
    processes = {"supervisor": [server.process.pid], "gateway": server.gateways(), "engine": server.engines()}
    with server.client() as client:
        upload(client)
    began_s, outcome = time.monotonic(), Outcome()
    memory = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        for half in range(2):
            share = -(-num_requests // (2 * num_workers))
            seeds = [seed * 1000 + half * num_workers + number for number in range(num_workers)]
            address = (server.host, server.port)
            for part in pool.map(work, [address] * num_workers, seeds, [share] * num_workers):
                outcome.num_requests += part.num_requests
                outcome.num_compared += part.num_compared
                outcome.statuses += part.statuses
                outcome.problems += part.problems
            memory.append({f"{role} {pid}": _anonymous(pid) for role, pids in processes.items() for pid in pids})
    growth = {name: memory[1][name] - nbytes for name, nbytes in memory[0].items()}
    if {"supervisor": [server.process.pid], "gateway": server.gateways(), "engine": server.engines()} != processes:
        outcome.problems.append("a process died")
    outcome.problems += [
        f"{name} grew by {nbytes} bytes" for name, nbytes in growth.items() if nbytes > MAX_GROWTH_BYTES
    ]
    if "Traceback" in server.log.read_text():
        outcome.problems.append("a traceback in the log")
    return {
        "requests": outcome.num_requests,
        "good_compared": outcome.num_compared,
        "seconds": round(time.monotonic() - began_s, 1),
        "statuses": {str(status): number for status, number in sorted(outcome.statuses.items())},
        "growth_bytes_second_half": growth,
        "problems": outcome.problems[: 2 * MAX_KEPT],
    }


def _anonymous(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def main(argv: Sequence[str]) -> int:
    """Runs; prints the report and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="of the server: cpu, cpu:0,1, cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="the report as JSON")
    arguments = parser.parse_args(argv)
    flags = (*FLAGS, "--device", arguments.device)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder, "log"), *flags) as server:
        report = fuzz(server, arguments.requests, arguments.workers, arguments.seed)
        with server.client() as client:
            report["about"] = describe(client.get("/v2").json(), "benchmarks.fuzz", list(argv))
    print(json.dumps(report, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
