"""A load of gRPC calls from a process of its own: the same message again and again, so many at once. Prints JSON.

    python -m benchmarks.grpc_load 127.0.0.1:8001 --rows 4 --in-flight 16 --seconds 3

A closed loop: each caller sends its next request when its last was answered. Messages are bytes that are made once, so that the
load costs as little as this library allows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import grpc
import numpy as np
import uvloop

from tilewire.service.gateway.grpc.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from tilewire.service.gateway.grpc.paths import INFER

COLUMNS = 512
WARM_S = 0.5


def message_of(rows: int) -> bytes:
    """A request for a softmax of so many rows of 2 KiB."""
    request = ModelInferRequest(model_name="softmax")
    request.inputs.add(name="x", datatype="FP32", shape=[rows, COLUMNS])
    request.raw_input_contents.append(np.linspace(0, 1, rows * COLUMNS, dtype=np.float32).tobytes())
    message: bytes = request.SerializeToString()
    return message


async def load(address: str, message: bytes, in_flight: int, seconds: float) -> dict[str, float]:
    """Sends for some time; returns what was answered and sent, with the warm-up, and latencies in microseconds."""
    latencies: list[float] = []
    sent = 1
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(INFER)
        nbytes = len(await call(message, wait_for_ready=True))
        begin_s = time.perf_counter() + WARM_S
        end_s = begin_s + seconds

        async def keep_busy() -> None:
            nonlocal sent
            sent_s = time.perf_counter()
            while sent_s < end_s:
                sent += 1
                answer = await call(message)
                assert len(answer) == nbytes, ModelInferResponse.FromString(answer)
                now_s = time.perf_counter()
                if sent_s >= begin_s:
                    latencies.append(now_s - sent_s)
                sent_s = now_s

        await asyncio.gather(*(keep_busy() for _ in range(in_flight)))
    latencies.sort()
    return {
        "requests": len(latencies),
        "seconds": seconds,
        "sent": sent,
        "p50_us": round(latencies[len(latencies) // 2] * 1e6),
        "p99_us": round(latencies[len(latencies) * 99 // 100] * 1e6),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    found = uvloop.run(load(arguments.address, message_of(arguments.rows), arguments.in_flight, arguments.seconds))
    print(json.dumps(found))
