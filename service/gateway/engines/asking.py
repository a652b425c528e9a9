"""Asks one engine something and waits for its answer. Runs in the gateway's event loop."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from tilewire.service.errors import Unavailable
from tilewire.service.gateway.engines.client import Engine, Reply
from tilewire.service.ipc.messages import (
    Command,
    DescribeTensor,
    Done,
    FetchTensor,
    Kernels,
    RegionList,
    Stale,
    TensorInfo,
    Tensors,
)

# A change reaches another engine within this, and a tensor is copied from one device to another, or the request is 503.
FOLLOW_TIMEOUT_S = 30.0

ReplyT = TypeVar("ReplyT", Done, Stale, Tensors, RegionList, Kernels)


async def ask(engine: Engine, request: Command, kind: type[ReplyT]) -> ReplyT:
    """Returns the answer of an engine to a request that is no job.

    Raises:
        TilewireError: The engine's error.
    """
    _, future = engine.send(request)
    reply = await asyncio.shield(future)
    assert isinstance(reply, kind), "This is a bug."
    return reply


async def ask_within(engine: Engine, request: Command, timeout_s: float, late: str) -> Tensors:
    """Returns what an engine answers within a time.

    Args:
        engine: The engine.
        request: Request that is no job.
        timeout_s: Longest time for the answer.
        late: Description of what takes too long.

    Raises:
        TilewireError: The engine's error; `Unavailable` when it takes too long.
    """
    _, future = engine.send(request)
    # Requests run without tasks, which `asyncio.timeout` would need.
    await asyncio.wait((future,), timeout=timeout_s)
    if not future.done():
        future.add_done_callback(_drop_error)
        raise Unavailable(late)
    reply = future.result()
    assert isinstance(reply, Tensors), "This is a bug."
    return reply


async def when_followed(engine: Engine, message: DescribeTensor | FetchTensor) -> TensorInfo:
    """Fetches a description from an engine that waits for a change, or for the tensor, before it answers.

    Raises:
        TilewireError: The engine's error; `Unavailable` when it takes too long.
    """
    late = f"{message.name}: an engine does not have its last change yet"
    return (await ask_within(engine, message, FOLLOW_TIMEOUT_S, late)).tensors[0]


def _drop_error(late: asyncio.Future[Reply]) -> None:
    """Drops the answer that nobody waits for any more."""
    if not late.cancelled():
        late.exception()
