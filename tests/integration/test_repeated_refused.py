"""Requests that are refused before their bodies are read, over and over, and what comes behind them on the connection."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.gateway_bench import GatewayBench, read_answer, until
from tests.support.raw_http import post
from tests.support.repeated_scenes import ONES, SENT, WEIGHT, ask, check_sum, play
from tests.support.tensor_bodies import TYPES, to_npy

REFUSED = post("/v1/add?b=@none", to_npy(ONES), content_type=TYPES["npy"])
HEAD_BYTES = REFUSED.index(b"\r\n\r\n") + 4
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n"

CUTS = {"all at once": len(REFUSED), "head first": HEAD_BYTES, "a part": HEAD_BYTES + 10, "but one": len(REFUSED) - 1}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("behind", ["next", "pipelined"])
def test_the_connection_stays_behind_small_bodies(cut: int, behind: str) -> None:
    async def scene(bench: GatewayBench) -> None:
        reader, writer = await bench.connect()
        for _ in range(3):
            writer.write(REFUSED[:cut])
            status, headers, _ = await read_answer(reader)
            assert status == 404
            assert ("connection", "close") not in headers
            if behind == "next":
                writer.write(REFUSED[cut:])
                await asyncio.sleep(0)
                check_sum(await ask((reader, writer), SENT[1]), ONES + WEIGHT)
                assert (await ask((reader, writer), HEALTH))[0] == 200
            else:
                writer.write(REFUSED[cut:] + SENT[2] + HEALTH + SENT[3])
                check_sum(await read_answer(reader), ONES * 2 + WEIGHT)
                assert (await read_answer(reader))[0] == 200
                check_sum(await read_answer(reader), ONES * 3 + WEIGHT)

    play(scene)


def test_many_in_one_read() -> None:
    async def scene(bench: GatewayBench) -> None:
        reader, writer = await bench.connect()
        for _ in range(3):
            writer.write(REFUSED * 5 + SENT[1])
            assert [(await read_answer(reader))[0] for _ in range(5)] == [404] * 5
            check_sum(await read_answer(reader), ONES + WEIGHT)

    play(scene)


def test_a_client_that_leaves_before_the_rest() -> None:
    async def scene(bench: GatewayBench) -> None:
        for _ in range(3):
            reader, writer = await bench.connect()
            writer.write(REFUSED[:HEAD_BYTES])
            assert (await read_answer(reader))[0] == 404
            writer.close()
            await until(lambda: not bench.server.server_state.connections)

    play(scene)
