"""The gateway's application under other ASGI servers, and over TLS: bodies take the plain path behind the same interface.

An engine of our own at the Protocol adds with NumPy in the arena; everything in front of it is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn

from tests.support.float64_oracle import random_array
from tests.support.jobs import SentJob
from tests.support.local_totals import LocalTotals
from tests.support.tensor_bodies import Array, decode, to_safetensors
from tilewire.service.config.process import GatewaySettings, Inherited
from tilewire.service.config.settings import Settings
from tilewire.service.gateway.app import create_app
from tilewire.service.gateway.connection.protocol import TilewireProtocol
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.client import NOT_RESIDING, Reply
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.gateway.request.room import Room
from tilewire.service.gateway.telemetry.metrics import GatewayMetrics
from tilewire.service.ipc.arena import Arena, Segment
from tilewire.service.ipc.messages import Command, Done, Template, Timings, Warming, Welcome

ARENA_BYTES = 2**24


class AddingEngine:
    """Adds two float32 tensors where they lie; see `engine_client.Engine`."""

    residing = NOT_RESIDING
    welcome = Welcome(0, "cpu", "cpu", "", "", "")
    warming: Warming | None = None
    outstanding = 0

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._ids = itertools.count()

    def send(self, request: Command) -> tuple[int, asyncio.Future[Reply]]:
        raise AssertionError(request)

    def submit(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> tuple[int, asyncio.Future[Reply]]:
        request = SentJob(template, offsets, caller.deadline_ns, caller.priority)
        total = self._floats(request.operands["a"].offset, request.out.num_elements)
        total = total + self._floats(request.operands["b"].offset, request.out.num_elements)
        self._segment.view[request.out_offset : request.out_offset + request.out.nbytes] = total.tobytes()
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        number = next(self._ids)
        future.set_result(Done(number, Timings()))
        return number, future

    def cancel(self, request_id: int, *, is_late: bool = False) -> asyncio.Future[None]:
        raise AssertionError("nobody leaves here")

    def _floats(self, offset: int, count: int) -> Array:
        return np.frombuffer(self._segment.view, np.float32, count, offset)


class QuietServer(uvicorn.Server):
    """Leaves the signals to pytest."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    segment = Segment.create("test", ARENA_BYTES)
    arena = Arena(segment)
    settings: GatewaySettings = gateway_settings()
    yield Gateway(
        settings=settings,
        version="test",
        engines=Engines([AddingEngine(segment)]),
        arena=arena,
        admission=Admission(Room(arena, settings.room_timeout_s), settings.max_in_flight, settings.max_body_bytes),
        metrics=GatewayMetrics(LocalTotals()),
    )
    assert arena.used_bytes == 0
    segment.close()


def gateway_settings() -> GatewaySettings:
    """The defaults, and no descriptor: nobody listens for us."""
    return Settings(arena_bytes=ARENA_BYTES, gateways=1).gateway(0, Inherited(-1), [])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    key, chain = str(folder / "key.pem"), str(folder / "chain.pem")
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *words, *names, "-keyout", key, "-out", chain], check=True, capture_output=True)
    return chain, key


@contextlib.contextmanager
def serving(gateway: Gateway, **options: object) -> Iterator[int]:
    """Runs uvicorn in a thread; yields its port."""
    config = uvicorn.Config(
        create_app(gateway),
        port=0,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        **options,  # type: ignore[arg-type]
    )
    server = QuietServer(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(params=["h11", "httptools", "tls", "tls-asyncio"])
def client(request: pytest.FixtureRequest, gateway: Gateway, certificate: tuple[str, str]) -> Iterator[httpx.Client]:
    """A client of one server: two of uvicorn's own protocols, and ours where the transport is TLS, on both event loops."""
    chain, key = certificate
    if not request.param.startswith("tls"):
        with serving(gateway, http=request.param) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
        return
    loop = "asyncio" if request.param == "tls-asyncio" else "uvloop"
    trusted = ssl.create_default_context(cafile=chain)
    with (
        serving(gateway, http=TilewireProtocol, loop=loop, ssl_certfile=chain, ssl_keyfile=key) as port,
        httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted) as client,
    ):
        yield client


@pytest.mark.parametrize("count", [1, 300, 2**19])
def test_bodies_of_known_length(client: httpx.Client, count: int) -> None:
    for seed in range(3):
        a, b = random_array("float32", (count,), seed), random_array("float32", (count,), seed + 7)
        response = client.post("/v1/add", content=to_safetensors({"a": a, "b": b}))
        assert response.status_code == 200, response.text
        np.testing.assert_array_equal(decode(response.headers["content-type"], response.content), a + b)


def test_bodies_in_chunks(client: httpx.Client) -> None:
    a = random_array("float32", (2**19,), 3)
    body = to_safetensors({"a": a, "b": a})
    pieces = (body[begin : begin + 100_000] for begin in range(0, len(body), 100_000))
    response = client.post("/v1/add", content=pieces)
    assert response.status_code == 200, response.text
    np.testing.assert_array_equal(decode(response.headers["content-type"], response.content), a + a)


def test_errors_and_what_comes_after_them(client: httpx.Client) -> None:
    a = random_array("float32", (8,), 3)
    response = client.post("/v1/add?nonsense=1", content=to_safetensors({"a": a, "b": a}))
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    response = client.post("/v1/add", content=to_safetensors({"a": a, "b": a}))
    np.testing.assert_array_equal(decode(response.headers["content-type"], response.content), a + a)


def test_another_server_altogether(gateway: Gateway) -> None:
    """httpx's own ASGI transport knows nothing of sockets: the bare interface."""

    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 1000):
            yield body[begin : begin + 1000]

    async def run() -> None:
        transport = httpx.ASGITransport(app=create_app(gateway))
        a = random_array("float32", (3000,), 5)
        body = to_safetensors({"a": a, "b": a})
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for content, headers in (
                (body, {}),
                (pieces(body), {}),
                (pieces(body), {"content-length": str(len(body))}),
            ):
                response = await client.post("/v1/add", content=content, headers=headers)
                assert response.status_code == 200, response.text
                np.testing.assert_array_equal(decode(response.headers["content-type"], response.content), a + a)

    asyncio.run(run())


def test_a_server_that_ends_early_is_no_error(gateway: Gateway, tmp_path: Path) -> None:
    """A client that leaves within its body, told by `http.disconnect` alone."""

    async def run() -> None:
        app = create_app(gateway)
        messages: list[dict] = [
            {"type": "http.disconnect"},
            {"type": "http.request", "body": b"x" * 10, "more_body": True},
        ]

        async def receive() -> dict:
            return messages.pop()

        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        headers = [(b"host", b"test"), (b"content-length", b"1000")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/add",
            "query_string": b"",
            "headers": headers,
            "state": {},
        }
        await app(scope, receive, send)  # type: ignore[arg-type]
        assert sent == []

    asyncio.run(run())
