"""Requests with ids and traces of their own that repeat others: each keeps its own, and nothing else comes in by them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.collector import Collector, attributes_of
from tests.support.exposition import is_idle, settles
from tests.support.gateway_bench import GatewayBench
from tests.support.live_server import LiveServer, serving
from tests.support.raw_http import RawConnection, post
from tests.support.repeated_scenes import ONES, WEIGHT, Answer, ask, check_sum, play
from tests.support.tensor_bodies import to_npy, to_safetensors
from tilewire.service.errors import TooBusy

OFFER = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAEAAEAAAAIAAAABAAMAAABkAAQ"}


def named(number: int, **headers: str) -> bytes:
    return post("/v1/add?b=@w", to_npy(ONES * number), x_request_id=f"number-{number:04}", **headers)


def id_of(answer: Answer) -> str:
    (found,) = [value for name, value in answer[1] if name == "x-request-id"]
    return found


@pytest.mark.parametrize("headers", [{}, OFFER, {"tracestate": "a=1"}, {"x_more": "the same"}], ids=str)
def test_each_request_keeps_its_id(headers: dict[str, str]) -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for number in range(20):
            answer = await ask(stream, named(number, **headers))
            check_sum(answer, ONES * number + WEIGHT)
            assert id_of(answer) == f"number-{number:04}"

    play(scene)


def test_ids_of_other_lengths_and_other_headers_are_other_heads() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for number in range(3):
            await ask(stream, named(number))
        longer = post("/v1/add?b=@w", to_npy(ONES), x_request_id="number-00004")
        for sent in (longer, named(5, accept="*/*"), post("/v1/add?b=@w", to_npy(ONES))):
            check_sum(await ask(stream, sent), np.frombuffer(sent[-48:], "f4").reshape(3, 4) + WEIGHT)
        assert id_of(await ask(stream, named(6))) == "number-0006"

    play(scene)


@pytest.mark.parametrize("given", ["two words", "          x", "ids\twith\ttab"])
def test_an_id_that_cannot_be_one_is_replaced(given: str) -> None:
    sent = [post("/v1/add?b=@w", to_npy(ONES), x_request_id=one) for one in ("x" * len(given), given)]

    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for _ in range(3):
            assert id_of(await ask(stream, sent[0])) == "x" * len(given)
        fresh, again = id_of(await ask(await bench.connect(), sent[1])), id_of(await ask(stream, sent[1]))
        if given.strip() == "x":
            assert fresh == again == "x"
        else:
            assert len(fresh) == len(again) == 32
            assert given not in (fresh, again)

    play(scene)


def test_no_header_comes_in_by_an_id() -> None:
    """A line's end where an id was would be a header that nobody has looked at."""
    given = "a\r\nx-timeout-ms: never"
    plain = post("/v1/add?b=@w", to_npy(ONES), x_request_id="x" * len(given))
    smuggled = post("/v1/add?b=@w", to_npy(ONES), x_request_id=given)
    assert len(plain) == len(smuggled)

    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for _ in range(4):
            assert (await ask(stream, plain))[0] == 200
        status, _, body = await ask(stream, smuggled)
        assert (status, b"X-Timeout-Ms" in body) == (400, True)

    play(scene)


def test_what_keeps_its_id() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for number in range(3):
            await ask(stream, named(number))
        # The engine says that the resident is another one now, and the request is planned again on the ordinary path.
        taller = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        bench.engine.residents["w"] = taller
        answer = await ask(stream, named(3))
        check_sum(answer, ONES * 3 + taller)
        assert id_of(answer) == "number-0003"
        # A body that turns out to be another one.
        for number in range(4, 6):
            await ask(stream, named(number))
        sent = named(6).replace(b"NUMPY", b"NUMPX")
        at = sent.index(b"\r\n\r\n") + 4
        stream[1].write(sent[:at])
        status, headers, body = await ask(stream, sent[at:])
        assert status == 415
        assert ("x-request-id", "number-0006") in headers
        assert json.loads(body)["request_id"] == "number-0006"

    play(scene)


def test_an_error_names_the_request() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for number in range(3):
            await ask(stream, named(number))
        bench.engine.error = TooBusy("the device is full")
        status, headers, body = await ask(stream, named(7))
        assert status == 429
        assert ("x-request-id", "number-0007") in headers
        assert json.loads(body)["request_id"] == "number-0007"

    play(scene)


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--gateways", "1", "--arena-bytes", "16MiB", "--access-log", "--log-format", "json")
    traced = ("--otlp-endpoint", collector.url, "--trace-ratio", "0")
    with serving(tmp_path_factory.mktemp("own") / "log", *flags, *traced) as server:
        yield server


def log_line(log: Path, request_id: str) -> dict[str, object]:
    lines = (json.loads(line) for line in log.read_text().splitlines() if request_id in line)
    (found,) = [line for line in lines if line["event"] == "request"]
    return dict(found)


def test_each_request_is_traced_under_its_own_caller(server: LiveServer, collector: Collector) -> None:
    body = to_safetensors({"a": ONES, "b": WEIGHT})
    with server.client() as client, RawConnection(server.connect()) as connection:
        traces = [f"{number:032x}" for number in range(1, 9)]
        for number, trace in enumerate(traces):
            # The last is not sampled by its caller: it has its id in the log and no span.
            parent = f"00-{trace}-{number + 1:016x}-{'00' if number == 7 else '01'}"
            connection.send(post("/v1/add", body, x_request_id=f"traced-{number}", traceparent=parent))
            assert connection.answer().status == 200
        assert settles(client, is_idle)
        for number, trace in enumerate(traces):
            assert log_line(server.log, f"traced-{number}")["trace_id"] == trace
            if number < 7:
                root, *_ = collector.trace(f"traced-{number}")
                assert root.trace_id.hex() == trace
                assert root.parent_span_id.hex() == f"{number + 1:016x}"
                assert attributes_of(root)["tilewire.request_id"] == f"traced-{number}"


def test_httpx_with_ids(server: LiveServer) -> None:
    with server.client() as client:
        client.put("/v1/tensors/w", content=to_safetensors({"w": WEIGHT}))
        with httpx.Client(base_url=server.url, trust_env=False) as other:
            for number in range(6):
                given = {"x-request-id": f"httpx-{number}"}
                answer = other.post("/v1/add?b=@w", content=to_npy(ONES), headers=given)
                assert answer.headers["x-request-id"] == given["x-request-id"]
