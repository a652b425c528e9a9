"""What a request takes of a gateway's memory is freed with it: others would wait for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.gateway_bench import GatewayBench, until
from tests.support.raw_http import head, post
from tests.support.repeated_scenes import ONES, SENT, Stream, ask, play
from tests.support.tensor_bodies import TYPES, to_npy, to_safetensors
from tilewire.service.errors import DeadlinePassed
from tilewire.service.gateway.connection.stream import CONTINUE
from tilewire.service.gateway.request.offload import OFFLOAD_BYTES

NUM_REQUESTS = 60
LARGE = to_npy(np.ones((300, 300), np.float32))
INFER = json.dumps(
    {"inputs": [{"name": name, "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3, 4]]} for name in ("a", "b")]}
).encode()
# So much JSON that a thread reads it.
WORDY_INFER = json.dumps({"inputs": [], "outputs": [{"name": "out"}] * (2 * OFFLOAD_BYTES // 16)}).encode()


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects() -> None:
    """Takes what other files' tests left out of the collector's sight; each test makes four passes over all."""
    gc.collect()
    gc.freeze()


def summed(number: int) -> bytes:
    return post("/v1/add", to_safetensors({"a": np.ones((2, number + 1), "f4"), "b": np.ones((2, number + 1), "f4")}))


REQUESTS: dict[str, tuple[int, Callable[[int], bytes]]] = {
    "of ever new shapes": (200, summed),
    "that repeat themselves": (200, lambda number: SENT[number % len(SENT)]),
    "with ids of their own": (200, lambda number: post("/v1/add?b=@w", to_npy(ONES), x_request_id=f"number-{number}")),
    "larger than one read": (200, lambda number: post("/v1/add?b=@large", LARGE, x_request_id=f"number-{number}")),
    "answered in JSON": (200, lambda number: post("/v1/add?b=@w", to_npy(ONES), accept=TYPES["json"])),
    "of the inference protocol": (
        200,
        lambda number: post("/v2/models/add/infer", INFER, content_type="application/json"),
    ),
    "that are refused": (400, lambda number: post("/v1/add?b=@w", b"no tensor", content_type=TYPES["npy"])),
    "that are refused in a thread": (
        400,
        lambda number: post("/v2/models/add/infer", WORDY_INFER, content_type="application/json"),
    ),
    "of a resident that is not there": (404, lambda number: post(f"/v1/add?b=@none{number}", to_npy(ONES))),
    "of an op that is not there": (404, lambda number: post(f"/v1/divide{number}", to_npy(ONES))),
    "for health": (200, lambda number: head("GET", "/healthz")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_requests_leave_nothing_to_collect(name: str) -> None:
    status, request = REQUESTS[name]

    async def asked(stream: Stream, first: int) -> None:
        for number in range(first, first + NUM_REQUESTS):
            assert (await ask(stream, request(number)))[0] == status

    async def scene(bench: GatewayBench) -> None:
        bench.engine.residents["large"] = np.ones((300, 300), np.float32)
        stream = await bench.connect()
        await asked(stream, 0)
        gc.collect()
        gc.disable()
        try:
            await asked(stream, NUM_REQUESTS)
            # Of the first and the last some may be left, of each none.
            assert gc.collect() < NUM_REQUESTS
        finally:
            gc.enable()

    play(scene)


# ── every way in which a request can end ──────────────────────────────────────────────────────────

SUM = post("/v1/add?b=@w", to_npy(ONES))
LARGE_SUM = post("/v1/add?b=@large", LARGE)
CHUNKED = head("POST", "/v1/add?b=@w", transfer_encoding="chunked")
CHUNKS = b"%x\r\n%b\r\n" % (len(to_npy(ONES)), to_npy(ONES))
DONE = b"0\r\n\r\n"


class Client:
    """One connection, without objects of asyncio's own on this side.

    Args:
        bench: Whom it is connected to.
    """

    def __init__(self, bench: GatewayBench) -> None:
        self.bench = bench
        self.sock = socket.create_connection(("127.0.0.1", bench.port))
        self.sock.setblocking(False)

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            await asyncio.get_running_loop().sock_sendall(self.sock, piece)

    async def send_slowly(self, *pieces: bytes) -> None:
        """Each piece is read before the next one is sent."""
        for piece in pieces:
            await self.send(piece)
            await asyncio.sleep(0.002)

    async def read(self, status: int) -> None:
        """Reads some of an answer; interim responses, which show that a client is still there, come before it."""
        begin = b""
        while not begin:
            begin = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sock, 2**16), 10)
            while begin.startswith(CONTINUE):
                begin = begin.removeprefix(CONTINUE)
        assert begin.startswith(b"HTTP/1.1 %d " % status), begin[:100]

    async def read_end(self) -> None:
        """Reads all that comes until the gateway closes."""
        while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sock, 2**16), 10):
            pass

    def leave(self) -> None:
        """Closes."""
        self.sock.close()

    def reset(self) -> None:
        """Closes as a process that was killed does, with bytes unread."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@dataclass(frozen=True)
class Ending:
    """How a request ends.

    Attributes:
        play: Plays it, on a connection of its own.
        settings: Of the gateway.
        is_held: The engine computes only when the client has left.
        error: What the engine answers.
    """

    play: Callable[[Client], Awaitable[None]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_held: bool = False
    error: Callable[[], Exception] | None = None


def answered(status: int, *pieces: bytes) -> Callable[[Client], Awaitable[None]]:
    """Sends, reads and leaves."""

    async def play(client: Client) -> None:
        await client.send(*pieces)
        await client.read(status)
        client.leave()

    return play


def closed(status: int, *pieces: bytes) -> Callable[[Client], Awaitable[None]]:
    """Sends, and reads until the gateway closes."""

    async def play(client: Client) -> None:
        await client.send(*pieces)
        await client.read(status)
        await client.read_end()
        client.leave()

    return play


async def closed_silently(client: Client) -> None:
    """Reads until the gateway closes, and sends nothing."""
    await client.read_end()
    client.leave()


def left(*pieces: bytes, is_reset: bool = False) -> Callable[[Client], Awaitable[None]]:
    """Sends and leaves at once."""

    async def play(client: Client) -> None:
        await client.send(*pieces)
        if is_reset:
            client.reset()
        else:
            client.leave()

    return play


def left_later(*pieces: bytes, is_reset: bool = False) -> Callable[[Client], Awaitable[None]]:
    """Sends, and leaves when the gateway has read it."""

    async def play(client: Client) -> None:
        await client.send_slowly(*pieces)
        if is_reset:
            client.reset()
        else:
            client.leave()

    return play


def left_while_computed(*pieces: bytes) -> Callable[[Client], Awaitable[None]]:
    """Leaves when the engine has the request, which then answers all the same."""

    async def play(client: Client) -> None:
        engine = client.bench.engine
        num_jobs, num_cancelled = len(engine.jobs), len(engine.cancelled)
        await client.send(*pieces)
        await until(lambda: len(engine.jobs) > num_jobs)
        client.leave()
        await until(lambda: len(engine.cancelled) > num_cancelled)
        engine.answer_all()

    return play


async def leave_pipelined_while_computed(client: Client) -> None:
    engine, state = client.bench.engine, client.bench.server.server_state
    num_jobs = len(engine.jobs)
    await client.send(SUM * 5)
    await until(lambda: len(engine.jobs) > num_jobs)
    client.reset()

    def is_noticed() -> bool:
        # Nothing is read behind a pipeline: only the answers find out.
        engine.answer_all()
        return not state.connections

    await until(is_noticed)


async def end_one_side(client: Client) -> None:
    await client.send(SUM)
    client.sock.shutdown(socket.SHUT_WR)
    await client.read(200)
    await client.read_end()
    client.leave()


def end_one_side_early(*pieces: bytes) -> Callable[[Client], Awaitable[None]]:
    """Ends the client's side in the body."""

    async def play(client: Client) -> None:
        for piece in pieces:
            await client.send(piece)
        client.sock.shutdown(socket.SHUT_WR)
        await client.read(400)
        await client.read_end()
        client.leave()

    return play


async def end_one_side_while_computed(client: Client) -> None:
    num_jobs = len(client.bench.engine.jobs)
    await client.send(SUM)
    await until(lambda: len(client.bench.engine.jobs) > num_jobs)
    client.sock.shutdown(socket.SHUT_WR)
    client.bench.engine.answer_all()
    await client.read_end()
    client.leave()


async def leave_while_downloading(client: Client) -> None:
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await client.send(LARGE_SUM)
    await client.read(200)
    client.reset()


def repeated(rest: Callable[[Client], Awaitable[None]]) -> Callable[[Client], Awaitable[None]]:
    """Sends such requests before."""

    async def play(client: Client) -> None:
        for number in range(3):
            await client.send(SENT[number])
            await client.read(200)
        await rest(client)

    return play


ENDINGS: dict[str, Ending] = {
    "answered": Ending(answered(200, SUM)),
    "answered twice": Ending(answered(200, SUM, SUM)),
    "answered, and closed as asked for": Ending(closed(200, post("/v1/add?b=@w", to_npy(ONES), connection="close"))),
    "answered, and idle for long": Ending(closed(200, SUM), {"keep_alive_s": 0.02}),
    "never begun": Ending(left()),
    "never begun, and idle for long": Ending(closed_silently, {"keep_alive_s": 0.02}),
    "answered in HTTP/1.0": Ending(closed(200, b"GET /healthz HTTP/1.0\r\n\r\n")),
    "left in the head": Ending(left_later(SUM[:20])),
    "left behind the head": Ending(left_later(SUM[: -len(to_npy(ONES))])),
    "left while uploading": Ending(left_later(SUM[:-10])),
    "left at once while uploading": Ending(left(SUM[:-10])),
    "reset while uploading": Ending(left_later(SUM[:-10], is_reset=True)),
    "left while uploading much": Ending(left_later(LARGE_SUM[:100], LARGE_SUM[100:200_000])),
    "reset while uploading much": Ending(left_later(LARGE_SUM[:100], LARGE_SUM[100:200_000], is_reset=True)),
    "left at once": Ending(left(SUM)),
    "reset at once": Ending(left(SUM, is_reset=True)),
    "left at once behind much": Ending(left(LARGE_SUM)),
    "reset at once behind much": Ending(left(LARGE_SUM, is_reset=True)),
    "left while computed": Ending(left_while_computed(SUM), is_held=True),
    "left while much is computed": Ending(left_while_computed(LARGE_SUM), is_held=True),
    "left while downloading": Ending(leave_while_downloading),
    "one side ended": Ending(end_one_side),
    "one side ended in a body": Ending(end_one_side_early(SUM[:-10])),
    "one side ended in a chunk": Ending(end_one_side_early(CHUNKED, CHUNKS[:-10])),
    "one side ended while computed": Ending(end_one_side_while_computed, is_held=True),
    "refused for its body": Ending(answered(400, post("/v1/add?b=@w", b"no tensor", content_type=TYPES["npy"]))),
    "refused before its body": Ending(answered(404, post("/v1/nothing", LARGE))),
    "refused for its length": Ending(answered(413, head("POST", "/v1/add", content_length=str(2**30)))),
    "refused without a length": Ending(answered(411, head("POST", "/v1/add"))),
    "refused for want of room": Ending(answered(429, SUM), {"max_in_flight": 0}),
    "refused, its deadline passed": Ending(answered(504, SUM), error=lambda: DeadlinePassed("late")),
    "stalled": Ending(answered(400, SUM[:-10]), {"body_timeout_s": 0.02}),
    "stalled in its head": Ending(closed(400, SUM[:20]), {"body_timeout_s": 0.02}),
    "one connection too many": Ending(closed(503, SUM), {"max_connections": 0}),
    "chunked": Ending(answered(200, CHUNKED + CHUNKS + DONE)),
    "chunked, left in a chunk": Ending(left_later(CHUNKED + CHUNKS[:-10])),
    "chunked, left between chunks": Ending(left_later(CHUNKED, CHUNKS)),
    "chunked, broken": Ending(closed(400, CHUNKED + b"zz")),
    "chunked, broken later": Ending(left_later(CHUNKED, CHUNKS, b"zz")),
    "chunked, trailers without end": Ending(closed(400, CHUNKED + CHUNKS + b"0\r\n" + b"a:b\r\n" * 20_000)),
    "no HTTP": Ending(closed(400, b"\x00\x01\r\n\r\n")),
    "no HTTP, left": Ending(left_later(b"\x00\x01\r\n\r\n")),
    "no HTTP behind a request": Ending(closed(200, SUM + b"\x00\x01\r\n\r\n")),
    "waiting to continue, left": Ending(
        left_later(head("POST", "/v1/add", content_length="999", expect="100-continue"))
    ),
    "pipelined": Ending(answered(200, SUM * 5)),
    "pipelined, left at once": Ending(left(SUM * 5)),
    "pipelined, left while computed": Ending(leave_pipelined_while_computed, is_held=True),
    "pipelined, left in the last": Ending(left_later(SUM * 5 + SUM[:-10])),
    "repeated": Ending(repeated(answered(200, SENT[3]))),
    "repeated, left at once": Ending(repeated(left(SENT[3]))),
    "repeated, left while uploading": Ending(repeated(left_later(SENT[3][:-10]))),
    "repeated, left at once while uploading": Ending(repeated(left(SENT[3][:-10]))),
}
NUM_ENDINGS = 20
# A request that is kept is dozens; metrics that were never counted before are some, once.
KEPT_OBJECTS = 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_an_ending_leaves_nothing(name: str) -> None:
    ending = ENDINGS[name]

    async def played(bench: GatewayBench) -> None:
        bench.engine.is_held = ending.is_held
        async with asyncio.timeout(20):
            for _ in range(NUM_ENDINGS):
                # One error for all would collect the tracebacks of all.
                bench.engine.error = None if ending.error is None else ending.error()
                await ending.play(Client(bench))
        state = bench.server.server_state
        await until(lambda: not state.connections and not state.tasks and not bench.admission.in_flight)
        bench.engine.jobs.clear()
        bench.engine.cancelled.clear()

    async def scene(bench: GatewayBench) -> None:
        bench.engine.residents["large"] = np.ones((300, 300), np.float32)
        await played(bench)
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            await played(bench)
            # Neither is anything kept, nor left for the collector: of the first and the last some may be, of each none.
            num_kept = len(gc.get_objects()) - before
            assert gc.collect() < NUM_ENDINGS
            assert num_kept < KEPT_OBJECTS * NUM_ENDINGS
        finally:
            gc.enable()

    play(scene, **ending.settings)
