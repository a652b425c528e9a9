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


async def ask(
    engine: Engine, request: Command, kind: type[ReplyT], timeout_s: float | None = None, late: str = ""
) -> ReplyT:
    """Returns the answer of an engine to a request that is no job, within `timeout_s`, or None for any time.

    Raises:
        TilewireError: The engine's error; `Unavailable` with the detail `late` when it takes too long.
    """
    _, future = engine.send(request)
    try:
        if timeout_s is None:
            reply = await asyncio.shield(future)
        else:
            # Requests run without tasks, which `asyncio.timeout` would need.
            await asyncio.wait((future,), timeout=timeout_s)
            if not future.done():
                future.add_done_callback(_drop_error)
                raise Unavailable(late)
            reply = future.result()
    finally:
        # An error that it holds leads back to this frame: left here, both would wait for the garbage collector.
        del future
    assert isinstance(reply, kind), "This is a bug."
    return reply


async def when_followed(engine: Engine, message: DescribeTensor | FetchTensor) -> TensorInfo:
    """Fetches a description from an engine that waits for a change, or for the tensor, before it answers.

    Raises:
        TilewireError: The engine's error; `Unavailable` when it takes too long.
    """
    late = f"{message.name}: within {FOLLOW_TIMEOUT_S:g} s an engine was too busy to answer, or did not get its last change"
    return (await ask(engine, message, Tensors, FOLLOW_TIMEOUT_S, late)).tensors[0]


def _drop_error(late: asyncio.Future[Reply]) -> None:
    """Drops the answer that nobody waits for any more."""
    if not late.cancelled():
        late.exception()
