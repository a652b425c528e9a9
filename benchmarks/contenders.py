"""The servers that `bench_http` measures: how each is started, what it is sent and what its answer says.

All but the raw socket and the body-only route multiply by the same weight, which lies in one safetensors file; `contender`
yields a server once its answer to a first request was right. Knows no load.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import ml_dtypes
import numpy as np

from benchmarks.bench_batching import safetensors_of
from benchmarks.load import Call
from tilewire.service.cli.launch import LaunchError, ending_with_us, running_server

TILEWIRE, TWENTY_LINES, LITSERVE, BODY_ONLY, RAW = "Tilewire", "20 lines", "LitServe", "body only", "raw socket"
ROOT = Path(__file__).parent.parent
OCTETS, SAFETENSORS = "application/octet-stream", "application/x-safetensors"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1

Array = np.ndarray


class WrongAnswer(Exception):
    """A server's answer is not the product: there is nothing to measure."""


# What one server or one load may fail with; the others are measured all the same.
FAILURES = (WrongAnswer, LaunchError, RuntimeError, ValueError, httpx.HTTPError, OSError)


@dataclass(frozen=True)
class Failure:
    """What could not be measured.

    Attributes:
        server: Its name.
        variant: How it was set up.
        question: Which load; empty for all.
        error: Why.
    """

    server: str
    variant: str
    question: str
    error: str

    @classmethod
    def of(cls, error: Exception, server: str, variant: str = "", question: str = "") -> Failure:
        """From what was raised; prints it."""
        failure = cls(server, variant, question, f"{type(error).__name__}: {error}")
        print(failure, flush=True)
        return failure


@dataclass(frozen=True)
class Contender:
    """One server.

    Attributes:
        name: What it is.
        variant: How it was set up, when there is a choice.
        start: Runs it; yields its address.
        path: Of the requests.
        is_right: Whether an answer's body is right, given the rows sent and the product expected.
        encode: Rows to a request's body.
        content_type: Of the body.
    """

    name: str
    variant: str
    start: Callable[[], AbstractContextManager[str]]
    path: str
    is_right: Callable[[bytes, Array, Array], bool]
    encode: Callable[[Array], bytes] = lambda rows: rows.tobytes()
    content_type: str = OCTETS

    def call(self, rows: Array) -> Call:
        """The request that sends these rows."""
        return Call(self.path, self.content_type, self.encode(rows))


def contenders(weight: Path, tilewire_flags: Sequence[str], litserves: Sequence[str]) -> list[Contender]:
    """Every server that can run here; prints which cannot, and why.

    Args:
        weight: A safetensors file whose tensor `w` is the weight.
        tilewire_flags: Of `tilewire serve`.
        litserves: LitServe's API processes, with options of `lit_server`: `4`, `4:fast-queue`.
    """
    env = {"WEIGHT": str(weight)}
    found = [
        Contender(RAW, "", partial(running_command, ["benchmarks.raw_socket"], env), "/echo", _is_echo),
        Contender(BODY_ONLY, "", partial(running_command, uvicorn_words("body_only"), env), "/read", _is_length),
        Contender(
            TWENTY_LINES, "", partial(running_command, uvicorn_words("twenty_lines"), env), "/matmul", _is_product
        ),
    ]
    if importlib.util.find_spec("litserve") is None:
        print("LitServe is left out: it is not installed (pip install '.[bench]')")
        litserves = ()
    for variant in litserves:
        number, *options = variant.split(":")
        words = ["benchmarks.lit_server", "--api-servers", number, *(f"--{option}" for option in options)]
        found.append(Contender(LITSERVE, variant, partial(running_command, words, env), "/predict", _is_product))
    found.append(tilewire(weight, tilewire_flags))
    return found


def tilewire(weight: Path, flags: Sequence[str], variant: str = "", env: Mapping[str, str] | None = None) -> Contender:
    """Tilewire with this weight resident.

    Args:
        weight: As above.
        flags: Of `tilewire serve`.
        variant: For the table.
        env: Further variables of its environment.
    """
    return Contender(
        TILEWIRE,
        variant,
        partial(_running_tilewire, weight, flags, env),
        "/v1/matmul?b=@w",
        lambda answer, rows, expected: _is_product(_payload(answer), rows, expected),
        lambda rows: safetensors_of(a=rows),
        SAFETENSORS,
    )


@contextmanager
def contender(one: Contender, rows: Array, weight: Array) -> Iterator[str]:
    """Runs a server; yields its address when it answers, and answers right.

    Raises:
        WrongAnswer: It answers wrong, or not at all.
    """
    expected = rows.astype(np.float32) @ weight.astype(np.float32)
    with one.start() as url:
        answer = _first_answer(url, one.call(rows))
        if not one.is_right(answer, rows, expected):
            raise WrongAnswer(f"{one.name} {one.variant}: {len(answer)} bytes that are not the answer")
        yield url


def uvicorn_words(app: str) -> list[str]:
    """What runs an application of this folder, without the log that would slow it down."""
    return ["uvicorn", f"benchmarks.{app}:app", "--log-level", "warning", "--no-access-log"]


@contextmanager
def running_command(words: Sequence[str], env: dict[str, str]) -> Iterator[str]:
    """Runs `python -m words --port …` and ends it with everything that it started.

    Yields:
        Its address, when the port is open.

    Raises:
        WrongAnswer: It ended, or did not open the port.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *words, "--port", str(port)]
    process = subprocess.Popen(ending_with_us(command), cwd=ROOT, env={**os.environ, **env}, start_new_session=True)
    try:
        _wait_open(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        # LitServe leaves processes behind; they are of its process group, which we made.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _running_tilewire(weight: Path, flags: Sequence[str], env: Mapping[str, str] | None) -> Iterator[str]:
    with running_server(*flags, env=env) as url:
        response = httpx.put(f"{url}/v1/tensors/w", content=weight.read_bytes(), timeout=START_TIMEOUT_S)
        response.raise_for_status()
        yield url


def _wait_open(process: subprocess.Popen[bytes], port: int) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(POLL_S)
        else:
            return
    raise WrongAnswer(f"{process.args!r} did not open its port")


def _first_answer(url: str, call: Call) -> bytes:
    end_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            response = httpx.post(
                url + call.path, content=call.body, headers={"content-type": call.content_type}, timeout=60
            )
            response.raise_for_status()
        except httpx.TransportError as error:
            if time.monotonic() > end_s:
                raise WrongAnswer(f"{url} does not answer: {error}") from None
            time.sleep(POLL_S)
        else:
            return response.content


def _payload(safetensors: bytes) -> bytes:
    return safetensors[8 + int.from_bytes(safetensors[:8], "little") :]


def _is_product(answer: bytes, _rows: Array, expected: Array) -> bool:
    if len(answer) != expected.size * 2:
        return False
    got = np.frombuffer(answer, ml_dtypes.bfloat16).reshape(expected.shape).astype(np.float32)
    return bool(np.allclose(got, expected, rtol=2e-2, atol=2e-2))


def _is_echo(answer: bytes, rows: Array, _expected: Array) -> bool:
    return answer == rows.tobytes()


def _is_length(answer: bytes, rows: Array, _expected: Array) -> bool:
    return answer == str(rows.nbytes).encode()
