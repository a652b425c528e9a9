"""Repeated infer requests: the answers of fresh connections, byte for byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from tests.support.exposition import is_idle, settles
from tests.support.gateway_bench import GatewayBench, until
from tests.support.live_server import LiveServer
from tests.support.oip_bodies import LENGTH, from_answer, text_input, to_binary
from tests.support.raw_http import post
from tests.support.repeated_scenes import ONES, WEIGHT, Answer, ask, fixed, play
from tests.support.tensor_bodies import NUMPY, Array
from tilewire.service.errors import TooBusy

BINARY_OUT = {"outputs": [{"name": "out", "parameters": {"binary_data": True}}]}
ADD = "/v2/models/add/infer"


def infer(arrays: dict[str, Array], target: str = ADD, headers: dict[str, str] | None = None, **members: Any) -> bytes:
    body, length = to_binary(arrays, **{**BINARY_OUT, **members})
    return post(target, body, **{LENGTH: length[LENGTH]}, **(headers or {}))


def sums(number: int, **members: Any) -> bytes:
    return infer({"a": ONES * number, "b": WEIGHT}, **members)


def check_sum(answer: Answer, expected: Array) -> dict[str, Any]:
    status, headers, body = answer
    assert status == 200, body
    document, out = from_answer(body, dict(headers).get(LENGTH.lower()))
    np.testing.assert_array_equal(out, expected)
    return document


RESIDENT = {"name": "b", "parameters": {"resident": "w"}}
MEMBERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "an id": {"id": "mine"},
    "a long id": {"id": "mine" * 40},
    "an option": {"parameters": {"alpha": 2}},
    "a priority and a time-out": {"parameters": {"priority": 3, "timeout": 10**7}},
    "binary by default": {"outputs": [], "parameters": {"binary_data_output": True}},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_answers_are_those_of_fresh_connections(members: dict[str, Any], dtype: str) -> None:
    x = np.arange(12).reshape(3, 4).astype(NUMPY[dtype])
    for target in (ADD, "/v2/models/add/versions/1/infer"):
        sent = infer({"a": x, "b": x}, target, **members)

        async def scene(bench: GatewayBench, sent: bytes = sent) -> None:
            fresh = await ask(await bench.connect(), sent)
            check_sum(fresh, x + x)
            stream = await bench.connect()
            for _ in range(6):
                assert fixed(await ask(stream, sent)) == fixed(fresh)
            ordinary, short = bench.engine.jobs[0], bench.engine.jobs[-1]
            assert (short.priority, short.options, short.out) == (ordinary.priority, ordinary.options, ordinary.out)
            assert bool(short.deadline_ns) == bool(ordinary.deadline_ns)
            # Payloads begin aligned, whatever stands in front.
            assert {one.offset % 64 for one in short.operands.values()} == {
                one.offset % 64 for one in ordinary.operands.values()
            }

        play(scene)


def test_every_answer_is_that_of_its_own_payload() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for number in range(20):
            check_sum(await ask(stream, sums(number)), ONES * number + WEIGHT)

    play(scene)


def test_a_resident_that_becomes_another_one() -> None:
    async def scene(bench: GatewayBench) -> None:
        header = json.dumps({"inputs": [*_inputs(ONES), RESIDENT], **BINARY_OUT}).encode()
        sent = post(ADD, header + ONES.tobytes(), **{LENGTH: str(len(header))})
        stream = await bench.connect()
        for _ in range(5):
            check_sum(await ask(stream, sent), ONES + WEIGHT)
        taller = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        bench.engine.residents["w"] = taller
        for _ in range(4):
            check_sum(await ask(stream, sent), ONES + taller)

    play(scene)


def _inputs(array: Array) -> list[dict[str, Any]]:
    body, headers = to_binary({"a": array})
    inputs: list[dict[str, Any]] = json.loads(body[: int(headers[LENGTH])])["inputs"]
    return inputs


def test_a_head_whose_body_comes_later() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for number in range(3):
            await ask(stream, sums(number))
        for number in range(3, 6):
            sent = sums(number)
            at = sent.index(b"\r\n\r\n") + 4
            stream[1].write(sent[:at])
            await until(lambda: bench.admission.in_flight == 1)
            stream[1].write(sent[at : at + 30])
            await asyncio.sleep(0.005)
            check_sum(await ask(stream, sent[at + 30 :]), ONES * number + WEIGHT)
        # As long a header, and another one.
        other = sums(7).replace(b'"shape": [3, 4]', b'"shape": [4, 3]')
        at = other.index(b"\r\n\r\n") + 4
        stream[1].write(other[:at])
        await until(lambda: bench.admission.in_flight == 1)
        check_sum(await ask(stream, other[at:]), (ONES * 7 + WEIGHT).reshape(4, 3))

    play(scene)


NEVER: dict[str, bytes] = {
    "JSON asked for": sums(1, outputs=[]),
    "compressed for who asks": infer({"a": ONES, "b": WEIGHT}, headers={"accept_encoding": "gzip"}),
    "numbers in the JSON": post(
        ADD, json.dumps({"inputs": [text_input("a", ONES), text_input("b", WEIGHT)], **BINARY_OUT}).encode()
    ),
    "no elements": infer({"a": ONES[:0], "b": WEIGHT[:0]}),
    "all residents": post(
        ADD,
        json.dumps({"inputs": [{"name": "a", "parameters": {"resident": "w"}}, RESIDENT], **BINARY_OUT}).encode(),
    ),
}


@pytest.mark.parametrize("sent", NEVER.values(), ids=NEVER)
def test_what_is_never_cached(sent: bytes) -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        fresh = await ask(await bench.connect(), sent)
        assert fresh[0] == 200
        for _ in range(5):
            assert fixed(await ask(stream, sent)) == fixed(fresh)

    play(scene)


def test_some_numbers_in_the_json_and_some_behind_it() -> None:
    async def scene(bench: GatewayBench) -> None:
        header = json.dumps({"inputs": [*_inputs(ONES), text_input("b", WEIGHT)], **BINARY_OUT}).encode()
        sent = post(ADD, header + ONES.tobytes(), **{LENGTH: str(len(header))})
        stream = await bench.connect()
        for _ in range(5):
            check_sum(await ask(stream, sent), ONES + WEIGHT)

    play(scene)


def test_errors_are_the_protocols() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for number in range(3):
            await ask(stream, sums(number))
        bench.engine.error = TooBusy("the device is full")
        short = await ask(stream, sums(4))
        long = await ask(await bench.connect(), sums(4))
        assert short[0] == long[0] == 429
        assert short[2] == long[2]
        assert json.loads(short[2]).keys() == {"error"}
        assert [name for name, _ in short[1]] == [name for name, _ in long[1]]

    play(scene)


def test_unmodified_clients(server: LiveServer) -> None:
    rng = np.random.default_rng(1)
    with server.client() as watcher:
        with triton.InferenceServerClient(f"{server.host}:{server.port}") as client:
            for _ in range(10):
                a, b = rng.standard_normal((16, 32), np.float32), rng.standard_normal((32, 8), np.float32)
                inputs = [triton.InferInput(name, list(one.shape), "FP32") for name, one in (("a", a), ("b", b))]
                for given, one in zip(inputs, (a, b), strict=True):
                    given.set_data_from_numpy(one)
                found = client.infer("matmul", inputs, outputs=[triton.InferRequestedOutput("out")])
                np.testing.assert_allclose(found.as_numpy("out"), a @ b, rtol=1e-4, atol=1e-4)
                assert found.get_response()["model_name"] == "matmul"
        assert settles(watcher, is_idle)
