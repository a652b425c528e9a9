"""The ways in which NVIDIA's gRPC client asks for a result: blocking, asyncio, and both with streams."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from typing import Any

import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

WAIT_S = 30.0


def blocking(address: str, model: str, inputs: Sequence[Any], **members: Any) -> Any:
    with triton.InferenceServerClient(address) as client:
        return client.infer(model, inputs, **members)


def blocking_stream(address: str, model: str, inputs: Sequence[Any], **members: Any) -> Any:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, inputs, **members)
        result, error = answers.get(timeout=WAIT_S)
        client.stop_stream()
    if error is not None:
        raise error
    return result


def asynchronous(address: str, model: str, inputs: Sequence[Any], **members: Any) -> Any:
    async def run() -> Any:
        async with triton_aio.InferenceServerClient(address) as client:
            return await client.infer(model, inputs, **members)

    return asyncio.run(run())


def asynchronous_stream(address: str, model: str, inputs: Sequence[Any], **members: Any) -> Any:
    async def requests() -> Any:
        yield {"model_name": model, "inputs": inputs, **members}

    async def run() -> Any:
        async with triton_aio.InferenceServerClient(address) as client:
            ((result, error),) = [answer async for answer in client.stream_infer(requests())]
        if error is not None:
            raise error
        return result

    return asyncio.run(run())


Way = Callable[..., Any]
WAYS: dict[str, Way] = {one.__name__: one for one in (blocking, blocking_stream, asynchronous, asynchronous_stream)}
