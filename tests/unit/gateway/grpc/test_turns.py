"""What is long is done in pieces, between which other calls have their turn."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from tilewire.service.errors import BodyTooLarge, InvalidRequest
from tilewire.service.gateway.api.v2.header import read_document
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.codecs.json_numbers import PIECE_NUMBERS
from tilewire.service.gateway.grpc.document import document_of
from tilewire.service.gateway.grpc.models import MODELS_AT_ONCE, message_of
from tilewire.service.gateway.grpc.open_inference_pb2 import ModelInferRequest, ModelStatisticsResponse
from tilewire.service.gateway.grpc.stream import RpcStream
from tilewire.service.gateway.grpc.wire import FED_BYTES, STEP_BYTES, Inflater
from tilewire.service.gateway.request.body import COPY_BYTES
from tilewire.service.ops.registry import OPS
from tilewire.service.telemetry.statistics import ModelStats

MIB = 2**20
ResultT = TypeVar("ResultT")
SIZES = [0, 1, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1, 3 * STEP_BYTES + 5]


def inflated(message: bytes, max_bytes: int) -> tuple[bytes, list[int]]:
    """A message, and the bytes that there were of it after each step."""
    inflater, lengths = Inflater(message, max_bytes), []
    while inflater.step():
        lengths.append(len(inflater.inflated))
    return bytes(inflater.inflated), [*lengths, len(inflater.inflated)]


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("levels", [1, 256])
def test_messages_are_inflated_in_steps(compress: Callable[[bytes], bytes], nbytes: int, levels: int) -> None:
    """Of noise all that is fed is kept; of zeros little that is fed inflates to much."""
    data = np.random.default_rng(nbytes).integers(0, levels, nbytes, np.uint8).tobytes()
    message = compress(data)
    got, lengths = inflated(message, nbytes)
    assert got == data
    assert max(np.diff([0, *lengths])) <= STEP_BYTES
    if levels == 256:
        assert len(lengths) >= nbytes // FED_BYTES


def test_a_bomb_is_inflated_no_further_than_the_limit() -> None:
    inflater = Inflater(gzip.compress(bytes(64 * MIB)), 2 * MIB)
    assert [inflater.step() for _ in range(2)] == [True] * 2
    with pytest.raises(BodyTooLarge, match="inflates to more than the limit of 2097152 bytes"):
        inflater.step()
    assert len(inflater.inflated) <= 2 * MIB + STEP_BYTES


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_stream_that_is_cut_off(nbytes: int) -> None:
    with pytest.raises(InvalidRequest, match="broken off"):
        inflated(gzip.compress(bytes(nbytes))[:-1], nbytes)


def test_typed_contents_are_converted_in_pieces() -> None:
    count = 3 * PIECE_NUMBERS + 1
    request = ModelInferRequest(model_name="softmax")
    one = request.inputs.add(name="x", datatype="FP32", shape=[count])
    one.contents.fp32_contents.extend(range(count))
    (pending,) = read_document(OPS["softmax"], document_of(request, [])).pending
    assert pending.numbers is not None
    assert [len(piece) for piece in pending.numbers.pieces] == [PIECE_NUMBERS] * 3 + [1]
    np.testing.assert_array_equal(np.concatenate(pending.numbers.pieces), np.arange(count))


def counting_turns(work: Coroutine[Any, Any, ResultT]) -> tuple[ResultT, int]:
    """Runs work; its result, and how often others had their turn meanwhile."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> ResultT:
        counting = asyncio.create_task(count_turns())
        result = await work
        counting.cancel()
        return result

    return asyncio.run(run()), turns


@pytest.mark.parametrize("count", [0, 1, MODELS_AT_ONCE, 5 * MODELS_AT_ONCE + 1])
def test_many_models_are_converted_in_parts(count: int) -> None:
    names = [f"p{number}" for number in range(count)]
    content = {"model_stats": [ModelStats(name, "1", inference_count=7) for name in names], "other": 1}
    message, turns = counting_turns(message_of(content, ModelStatisticsResponse))
    assert [(one.name, one.inference_count) for one in message.model_stats] == [(name, 7) for name in names]
    assert turns >= (count - 1) // MODELS_AT_ONCE


@pytest.mark.parametrize("nbytes", [100, 5 * COPY_BYTES + 1])
def test_a_large_answer_is_copied_in_pieces(nbytes: int) -> None:
    payload = memoryview(bytearray(np.random.default_rng(0).bytes(nbytes)))

    async def run() -> bytes:
        stream = RpcStream(Flow(1))
        stream.respond(200, "", (b"head", payload), closes=False)
        return await stream.take_message()

    message, turns = counting_turns(run())
    assert message == b"head" + payload
    assert turns >= nbytes // COPY_BYTES
