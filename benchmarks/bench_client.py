"""What the Python client costs on top of the network: one thread, one connection, a server that sends the body back.

    python -m benchmarks.bench_client --elements 4096 8388608

Prints for each size the median of a call by `tilewire.Client`, by the same over httpx, by httpx alone, and by a bare socket.
The contenders take turns, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

import httpx
import numpy as np
import safetensors.numpy

import tilewire
from benchmarks.command import out_folder
from benchmarks.machine import describe

ROUNDS = 7
SECONDS_A_TURN = 0.25
CONTENT_TYPE = "application/x-safetensors"
START_TIMEOUT_S = 10.0


def run(argv: Sequence[str] | None = None) -> int:
    """Measures and prints a JSON object a line.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="bench client", description=__doc__)
    parser.add_argument("--elements", type=int, nargs="+", default=[4096, 2**23], help="float32 numbers of each body")
    parser.add_argument("--out", type=out_folder, help="folder for client.json")
    arguments = parser.parse_args(argv)
    rows = []
    with echo_server() as port:
        for num_elements in arguments.elements:
            medians_us = measure(port, num_elements)
            row = {"elements": num_elements, **{f"{name}_us": round(value, 1) for name, value in medians_us.items()}}
            row["over_httpx_us"] = round(medians_us["client_on_httpx"] - medians_us["httpx"], 1)
            row["own_over_httpx_us"] = round(medians_us["client"] - medians_us["httpx"], 1)
            row["of_the_socket"] = round(medians_us["socket"] / medians_us["client"], 2)
            print(json.dumps(row), flush=True)
            rows.append(row)
    if arguments.out is not None:
        said = describe({}, "benchmarks.bench_client", list(argv if argv is not None else sys.argv[1:]))
        result = {"question": "what the client costs, medians of a call in µs", **said, "rows": rows}
        (arguments.out / "client.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


@contextmanager
def echo_server() -> Iterator[int]:
    """Runs `benchmarks.raw_socket` in a process of its own; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.raw_socket", "--port", str(port)]
    with subprocess.Popen(command) as server:
        try:
            wait_for(port)
            yield port
        finally:
            server.terminate()


def wait_for(port: int) -> None:
    """Returns once something listens."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.01)
    raise TimeoutError(f"no server on port {port} within {START_TIMEOUT_S} s")


def measure(port: int, num_elements: int) -> dict[str, float]:
    """Median microseconds of a call by contender."""
    url = f"http://127.0.0.1:{port}/echo"
    x = np.ones((1, num_elements), np.float32)
    body = safetensors.numpy.save({"x": x})
    http = httpx.Client()
    headers = {"Content-Type": CONTENT_TYPE, "Accept": CONTENT_TYPE}
    client = tilewire.Client(url)
    on_httpx = tilewire.Client(url, transport=httpx.HTTPTransport())
    with http, client, on_httpx, closing(socket.create_connection(("127.0.0.1", port))) as bare:
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        contenders: dict[str, Callable[[], object]] = {
            "client": lambda: client.softmax(x),
            "client_on_httpx": lambda: on_httpx.softmax(x),
            "httpx": lambda: http.post(f"{url}/v1/softmax", content=body, headers=headers).content,
            "socket": lambda: exchange(bare, body),
        }
        times_us: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(ROUNDS):
            for name, call in contenders.items():
                times_us[name] += turn(call)
    return {name: statistics.median(values) for name, values in times_us.items()}


def turn(call: Callable[[], object]) -> list[float]:
    """Microseconds of each call of one turn."""
    call()
    times_us: list[float] = []
    until = time.perf_counter() + SECONDS_A_TURN
    while time.perf_counter() < until or not times_us:
        began = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - began) / 1e3)
    return times_us


def exchange(connection: socket.socket, body: bytes) -> bytearray:
    """One request and its answer, by a bare socket."""
    connection.sendmsg([b"POST /echo/ HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)])
    connection.sendall(body)
    head = connection.recv(65536)
    begin = head.index(b"\r\n\r\n") + 4
    answer = bytearray(int(head[:begin].lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
    received = len(head) - begin
    answer[:received] = head[begin:]
    with memoryview(answer) as view:
        while received < len(answer):
            received += connection.recv_into(view[received:])
    return answer


if __name__ == "__main__":
    raise SystemExit(run())
