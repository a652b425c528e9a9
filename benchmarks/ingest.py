"""How fast one connection takes in one large body: a raw `recv_into`, FastAPI and Tilewire.

Owns a sender that costs little, and its clock: the body lies in a memfd and leaves by `sendfile`, so that the receiver is what
limits. Part of `bench_http`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import ml_dtypes
import numpy as np

from benchmarks.bench_batching import safetensors_of
from benchmarks.contenders import (
    BODY_ONLY,
    FAILURES,
    OCTETS,
    RAW,
    SAFETENSORS,
    TILEWIRE,
    Failure,
    running_command,
    uvicorn_words,
)
from benchmarks.load import Call
from tilewire.service.cli.launch import running_server

# Bodies of a turn; the first ones fault pages in. Turns of each server.
TIMES, WARM_UP_TIMES = 5, 2
ROUNDS = 3
HEAD_END = b"\r\n\r\n"
_RECEIVE = re.compile(rb"receive;dur=([\d.]+)")
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Ingest:
    """How fast one server took in a large body; medians.

    Attributes:
        server: Its name.
        body_bytes: Of a request.
        gb_per_s: By the client's clock, from the first byte sent to the last byte of the answer.
        receive_gb_per_s: By the server's own clock, or None.
    """

    server: str
    body_bytes: int
    gb_per_s: float
    receive_gb_per_s: float | None

    @property
    def question(self) -> str:
        """For the table."""
        return f"{self.body_bytes / 2**20:.0f} MiB, 1 connection"


def measure_ingest(
    device: str, nbytes: int, size: int, failures: list[Failure]
) -> tuple[list[Ingest], dict[str, object]]:
    """Sends one large body over one connection, a few times, to each server; adds what failed.

    The servers take turns: a machine may copy half as fast a minute later. Tilewire multiplies the body by a resident column:
    its answer is small.

    Returns:
        The rows, and what Tilewire says of itself.
    """
    operand = np.ones((nbytes // 2 // size, size), ml_dtypes.bfloat16)
    plain, product = operand.tobytes(), safetensors_of(a=operand)
    limits = ["--max-body-bytes", str(2 * nbytes), "--arena-bytes", str(nbytes + nbytes // 4 + 2**24)]
    identity: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        open_: dict[str, tuple[str, Call]] = {}
        for server, serving, call in (
            (RAW, running_command(["benchmarks.raw_socket"], {}), Call("/sink", OCTETS, plain)),
            (BODY_ONLY, running_command(uvicorn_words("body_only"), {}), Call("/read", OCTETS, plain)),
            (
                TILEWIRE,
                running_server("--device", device, "--gateways", "1", *limits),
                Call("/v1/matmul?b=@v", SAFETENSORS, product),
            ),
        ):
            try:
                url = stack.enter_context(serving)
                if server == TILEWIRE:
                    identity = httpx.get(f"{url}/v2").json()
                    column = safetensors_of(v=np.ones((size, 1), ml_dtypes.bfloat16))
                    httpx.put(f"{url}/v1/tensors/v", content=column).raise_for_status()
                open_[server] = (url, call)
            except FAILURES as error:
                failures.append(Failure.of(error, server, question="ingest"))
        return _take_turns(open_, failures), identity


def _take_turns(servers: Mapping[str, tuple[str, Call]], failures: list[Failure]) -> list[Ingest]:
    """Measures servers in turns; those that fail are left out from then on."""
    taken: dict[str, list[tuple[float, float | None]]] = {server: [] for server in servers}
    for _ in range(ROUNDS):
        for server in list(taken):
            try:
                taken[server] += send_bodies(*servers[server], TIMES)[WARM_UP_TIMES:]
            except FAILURES as error:
                failures.append(Failure.of(error, server, question="ingest"))
                del taken[server]
    return [_row(server, len(servers[server][1].body), times) for server, times in taken.items()]


def _row(server: str, nbytes: int, taken: Sequence[tuple[float, float | None]]) -> Ingest:
    receive_s = [receive_s for _, receive_s in taken if receive_s is not None]
    row = Ingest(
        server,
        nbytes,
        nbytes / statistics.median(seconds for seconds, _ in taken) / 1e9,
        nbytes / statistics.median(receive_s) / 1e9 if receive_s else None,
    )
    own = f"  {row.receive_gb_per_s:.2f} GB/s by its own clock" if row.receive_gb_per_s else ""
    print(f"{row.question:<34} {server:<10} {row.gb_per_s:>8.2f} GB/s{own}", flush=True)
    return row


def send_bodies(url: str, call: Call, times: int) -> Sequence[tuple[float, float | None]]:
    """Sends the same request again and again over one connection.

    Returns:
        For each: seconds by our clock, and the seconds that the server says receiving took, if it says so.

    Raises:
        RuntimeError: An answer's status is not 200.
    """
    place = urlsplit(url)
    nbytes = len(call.body)
    head = f"POST {call.path} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: {call.content_type}\r\n"
    head += f"content-length: {nbytes}\r\n\r\n"
    fd = os.memfd_create("ingest")
    with os.fdopen(fd, "r+b", buffering=0) as file:
        rest = memoryview(call.body)
        while rest:
            rest = rest[file.write(rest) :]
        with socket.create_connection((place.hostname or "", place.port or 80), timeout=120) as connection:
            # `sendfile` wants a socket that blocks.
            connection.settimeout(None)
            return [_send(connection, head.encode(), fd, nbytes) for _ in range(times)]


def _send(connection: socket.socket, head: bytes, fd: int, nbytes: int) -> tuple[float, float | None]:
    began_s = time.perf_counter()
    connection.sendall(head, socket.MSG_MORE)
    sent = 0
    while sent < nbytes:
        sent += os.sendfile(connection.fileno(), fd, sent, nbytes - sent)
    answer = b""
    while HEAD_END not in answer:
        answer += _receive(connection)
    head_bytes, _, body = answer.partition(HEAD_END)
    if b" 200 " not in head_bytes.partition(b"\r\n")[0]:
        raise RuntimeError(f"refused: {answer[:500]!r}")
    length = _LENGTH.search(head_bytes)
    assert length is not None, "This is a bug."
    rest = int(length[1]) - len(body)
    while rest > 0:
        rest -= len(_receive(connection))
    seconds = time.perf_counter() - began_s
    receive = _RECEIVE.search(head_bytes)
    return seconds, float(receive[1]) / 1e3 if receive else None


def _receive(connection: socket.socket) -> bytes:
    piece = connection.recv(2**20)
    if not piece:
        raise RuntimeError("the server closed the connection before the end of its answer")
    return piece
