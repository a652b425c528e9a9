"""What a request takes of a gateway's memory is freed with it: others would wait for the garbage collector."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.gateway_bench import GatewayBench
from tests.support.lane_scenes import ONES, SENT, Stream, ask, play
from tests.support.raw_http import head, post
from tests.support.tensor_bodies import TYPES, to_npy, to_safetensors

NUM_REQUESTS = 60
LARGE = to_npy(np.ones((300, 300), np.float32))
INFER = json.dumps(
    {"inputs": [{"name": name, "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3, 4]]} for name in ("a", "b")]}
).encode()


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
    "of an op that is not there": (404, lambda number: post(f"/v1/divide{number}", to_npy(ONES))),
    "for health": (200, lambda number: head("GET", "/healthz")),
}


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
