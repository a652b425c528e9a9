"""Repeated requests through a gateway's own server, with an engine that answers when it is told to."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from tests.support.gateway_bench import GatewayBench, read_answer, until
from tests.support.raw_http import head, post
from tests.support.repeated_scenes import ONES, SENT, WEIGHT, ask, begun, check_sum, fixed, play, warmed
from tests.support.tensor_bodies import NUMPY, TYPES, encode, to_npy, to_safetensors

FORMS = [
    (form, dtype, target)
    for form, dtypes in (("npy", ("float16", "float32", "float64", "int32")), ("safetensors", ("bfloat16", "int64")))
    for dtype in dtypes
    for target in ("/v1/add?b=@resident", "/v1/add")
    if form == "safetensors" or target != "/v1/add"
]


@pytest.mark.parametrize("accept", [None, *TYPES.values()])
@pytest.mark.parametrize(("form", "dtype", "target"), FORMS)
def test_answers_are_those_of_fresh_connections(form: str, dtype: str, target: str, accept: str | None) -> None:
    x = np.arange(12).reshape(3, 4).astype(NUMPY[dtype])
    body, headers = encode(form, {"a": x} if "@" in target else {"a": x, "b": x})
    if accept is not None:
        headers["accept"] = accept
    sent = post(target, body, **{name.replace("-", "_"): value for name, value in headers.items()})

    async def scene(bench: GatewayBench) -> None:
        bench.engine.residents["resident"] = x
        fresh = await ask(await bench.connect(), sent)
        status = 415 if accept in (TYPES["npy"], TYPES["npz"]) and dtype == "bfloat16" else 200
        assert fresh[0] == status
        stream = await bench.connect()
        for _ in range(6):
            assert fixed(await ask(stream, sent)) == fixed(fresh)

    play(scene)


def test_every_answer_is_that_of_its_own_payload() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        for number, sent in enumerate(SENT):
            check_sum(await ask(stream, sent), ONES * number + WEIGHT)
        assert len(bench.engine.jobs) == len(SENT) + 2

    play(scene)


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_of_the_stream_gives_the_same_answers(seed: int) -> None:
    """Requests of three kinds in a row, cut anywhere: pipelined, halved, whole."""
    rng = random.Random(seed)
    small = SENT
    large = [
        post("/v1/add", to_safetensors({"a": np.full((100, 100), number, np.float32), "b": np.ones((100, 100), "f4")}))
        for number in range(20)
    ]
    order = [rng.choice((small, small, large)) for _ in range(40)]
    numbers = [rng.randrange(20) for _ in order]
    stream_bytes = b"".join(kind[number] for kind, number in zip(order, numbers, strict=True))

    async def send(writer: asyncio.StreamWriter, at: int = 0) -> None:
        while at < len(stream_bytes):
            size = rng.choice((1, 50, len(small[0]), len(small[0]), 3 * len(small[0]), len(large[0]), 100_000))
            writer.write(stream_bytes[at : at + size])
            at += size
            await writer.drain()
            await asyncio.sleep(rng.choice((0, 0, 0.001)))

    async def scene(bench: GatewayBench) -> None:
        reader, writer = await bench.connect()
        sending = asyncio.create_task(send(writer))
        for kind, number in zip(order, numbers, strict=True):
            expected = ONES * number + WEIGHT if kind is small else np.full((100, 100), number + 1, np.float32)
            check_sum(await read_answer(reader), expected)
        await sending
        writer.close()

    play(scene)


def test_requests_that_come_one_by_one_whole_or_head_first() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        body_at = SENT[0].index(b"\r\n\r\n") + 4
        for cut in (body_at, body_at + 128, body_at + 130, len(SENT[0]) - 1, len(SENT[0])):
            await begun(bench, stream, SENT[3][:cut])
            stream[1].write(SENT[3][cut:])
            check_sum(await read_answer(stream[0]), ONES * 3 + WEIGHT)

    play(scene)


def test_a_body_of_many_reads() -> None:
    a = np.arange(60_000, dtype=np.float32).reshape(2, 30_000)
    sent = post("/v1/add?b=@v", to_npy(a))

    async def scene(bench: GatewayBench) -> None:
        bench.engine.residents["v"] = a
        stream = await warmed(bench, sent)
        for _ in range(5):
            for at in range(0, len(sent), 50_000):
                stream[1].write(sent[at : at + 50_000])
                await asyncio.sleep(0.002)
            check_sum(await read_answer(stream[0]), a + a)

    play(scene)


@pytest.mark.parametrize("num_more", [1, 2, 3])
def test_pipelined_requests_behind_one(num_more: int) -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        bench.engine.is_held = True
        stream[1].write(SENT[1])
        await until(lambda: len(bench.engine.jobs) == 3)
        stream[1].write(b"".join(SENT[2 : 2 + num_more]))
        await asyncio.sleep(0.01)
        bench.engine.is_held = False
        bench.engine.answer_all()
        for number in range(1, 2 + num_more):
            check_sum(await read_answer(stream[0]), ONES * number + WEIGHT)
        check_sum(await ask(stream, SENT[7]), ONES * 7 + WEIGHT)

    play(scene)


@pytest.mark.parametrize("num", [2, 3])
def test_requests_in_one_read(num: int) -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        stream[1].write(b"".join(SENT[:num]))
        for number in range(num):
            check_sum(await read_answer(stream[0]), ONES * number + WEIGHT)

    play(scene)


@pytest.mark.parametrize("num_kinds", [2, 20])
def test_a_few_kinds_of_requests_in_turn(num_kinds: int) -> None:
    kinds = [post(f"/v1/add?b=@w&alpha={number}", to_npy(ONES)) for number in range(num_kinds)]

    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for _ in range(5):
            for sent in kinds:
                check_sum(await ask(stream, sent), ONES + WEIGHT)

    play(scene)


def test_other_heads_and_other_bodies() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        for target in ("/v1/add?b=@w&alpha=2", "/v1/add?b=@w&alpha=3"):
            assert (await ask(stream, post(target, to_npy(ONES))))[0] == 200
        # The same head, and behind it a tensor of another shape or of none.
        flat = post("/v1/add?b=@w", to_npy(ONES.reshape(1, 3, 4)), content_type=TYPES["npy"])
        assert len(flat) == len(SENT[0])
        check_sum(await ask(stream, flat), (ONES + WEIGHT).reshape(1, 3, 4))
        broken = SENT[0].replace(b"NUMPY", b"NUMPX")
        assert (await ask(stream, broken))[0] == 400
        check_sum(await ask(stream, flat), (ONES + WEIGHT).reshape(1, 3, 4))
        check_sum(await ask(stream, flat), (ONES + WEIGHT).reshape(1, 3, 4))

    play(scene)


def test_a_head_whose_body_turns_out_to_be_another() -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await warmed(bench)
        for sent, status in ((SENT[0].replace(b"NUMPY", b"NUMPX"), 400), (SENT[5], 200)):
            at = sent.index(b"\r\n\r\n") + 4
            stream[1].write(sent[:at])
            await until(lambda: bench.admission.in_flight == 1)
            stream[1].write(sent[at:])
            assert (await read_answer(stream[0]))[0] == status

    play(scene)


@pytest.mark.parametrize(
    "headers",
    [
        {"expect": "100-continue"},
        {"connection": "close"},
        {"content_encoding": "identity"},
        {"x_request_id": "mine", "X_Request_ID": "yours"},
    ],
    ids=str,
)
def test_heads_that_change_the_way_or_say_two_things_are_never_remembered(headers: dict[str, str]) -> None:
    sent = post("/v1/add?b=@w", to_npy(ONES), **headers)

    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for _ in range(4):
            status, found, _ = await ask(stream, sent)
            assert status == 200
            if "x_request_id" in headers:
                assert ("x-request-id", "yours") in found
            if headers.get("connection") == "close":
                assert ("connection", "close") in found
                return

    play(scene)


def chunked(body: bytes) -> bytes:
    start = head("POST", "/v1/add?b=@w", transfer_encoding="chunked")
    return start + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize(
    "sent",
    [
        # Swapped where it lies.
        pytest.param(post("/v1/add?b=@w", to_npy(ONES.astype(">f4"))), id="big-endian"),
        pytest.param(chunked(to_npy(ONES)), id="chunked"),
    ],
)
def test_what_has_no_fixed_bytes_in_front_or_is_changed_in_its_slot_is_never_remembered(sent: bytes) -> None:
    async def scene(bench: GatewayBench) -> None:
        stream = await bench.connect()
        for _ in range(4):
            check_sum(await ask(stream, sent), ONES + WEIGHT)

    play(scene)
