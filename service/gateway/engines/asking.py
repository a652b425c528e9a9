"""Sends commands to one engine and waits for its answers, or for jobs. Runs in the gateway's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

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
# At a deadline an engine that works says within this whether a job has started.
VERDICT_TIMEOUT_S = 0.1

# Detail of the error when an engine does not say whether it has started the job.
NO_RESULT = "deadline: it passed before there was a result; the request may be computed all the same"

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


class SentJob(NamedTuple):
    """A job that an engine has.

    Attributes:
        reply: Its answer, or its error.
    """

    engine: Engine
    request_id: int
    reply: asyncio.Future[Reply]


async def have_ended(jobs: Sequence[SentJob], deadline_ns: int) -> bool:
    """Waits for jobs, of which those that have not started by their deadline are cancelled; 0 for none.

    Returns:
        Whether all have ended; else an engine does not say what became of its own.
    """
    replies = [job.reply for job in jobs]
    _, pending = await asyncio.wait(replies, timeout=left_s(deadline_ns))
    if not pending:
        return True
    verdicts = [job.engine.cancel(job.request_id, is_late=True) for job in jobs if job.reply in pending]
    _, unsaid = await asyncio.wait(verdicts, timeout=VERDICT_TIMEOUT_S)
    if unsaid:
        return False
    await asyncio.wait(replies)
    return True


def left_s(deadline_ns: int) -> float | None:
    """The time until a deadline on the monotonic clock, None for the deadline 0."""
    return max(0, deadline_ns - time.monotonic_ns()) / 1e9 if deadline_ns else None


def _drop_error(late: asyncio.Future[Reply]) -> None:
    """Drops the answer that nobody waits for any more."""
    if not late.cancelled():
        late.exception()
