"""Requests that repeat themselves, and connections on which they did: what their tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import uvloop

from tests.support.gateway_bench import GatewayBench, read_answer, until
from tests.support.raw_http import post
from tests.support.tensor_bodies import TYPES, Array, decode, to_npy

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Answer = tuple[int, list[tuple[str, str]], bytes]

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
ONES = np.ones((3, 4), np.float32)
# The header of the same request is the same, its payload is not.
SENT = [post("/v1/add?b=@w", to_npy(ONES * number), content_type=TYPES["npy"]) for number in range(20)]
VARYING = ("date", "x-request-id", "server-timing")


def play(scene: Callable[[GatewayBench], Awaitable[None]], **settings: Any) -> None:
    """Runs a scene on a bench that serves; afterwards nothing is left behind."""

    async def run() -> None:
        bench = GatewayBench(**settings)
        bench.engine.residents["w"] = WEIGHT
        async with bench.serving():
            await scene(bench)

    uvloop.run(run())


async def ask(stream: Stream, sent: bytes) -> Answer:
    stream[1].write(sent)
    return await read_answer(stream[0])


async def warmed(bench: GatewayBench, sent: bytes = SENT[0]) -> Stream:
    """A connection on which such requests came before."""
    stream = await bench.connect()
    for _ in range(2):
        assert (await ask(stream, sent))[0] == 200
    return stream


def fixed(answer: Answer) -> tuple[int, list[tuple[str, str]], bytes]:
    """An answer without what differs each time."""
    status, headers, body = answer
    # A problem names its request.
    told = body if status == 200 else body.partition(b'"request_id"')[0]
    return status, [(name, "" if name in VARYING else value) for name, value in headers], told


def check_sum(answer: Answer, expected: Array) -> None:
    status, headers, body = answer
    assert status == 200
    np.testing.assert_array_equal(decode(dict(headers)["content-type"], body), expected)


async def begun(bench: GatewayBench, stream: Stream, piece: bytes) -> None:
    """Sends the beginning of a request, or all of it, and returns when the gateway has taken it up."""
    num_jobs = len(bench.engine.jobs)
    stream[1].write(piece)
    await until(lambda: bench.admission.in_flight == 1 or len(bench.engine.jobs) > num_jobs)
