"""Runs work above a size in a thread, so that one request does not block the event loop for others.

The threads release the interpreter's lock in zlib and between pieces of text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tilewire.service.errors import Unavailable
from tilewire.service.gateway.request.admission import Leases

ReturnT = TypeVar("ReturnT")
ParametersP = ParamSpec("ParametersP")

# Bytes of text or of inflated data that take about a millisecond; handing work to a thread takes 50 µs.
OFFLOAD_BYTES = 2**16

# More threads would share the same core with the loop.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="offload")


class LoopRoom:
    """Slots for work in a thread: each is leased in the event loop."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._loop = asyncio.get_running_loop()

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        return asyncio.run_coroutine_threadsafe(self._take(nbytes), self._loop).result()

    async def _take(self, nbytes: int) -> tuple[int, memoryview]:
        return self._leases.take(nbytes)


async def offload_with_room(nbytes: int, leases: Leases, work: Callable[..., ReturnT], *args: object) -> ReturnT:
    """As `offload`; the last argument of `work` is room for tensors, of the request's slots."""
    if nbytes <= OFFLOAD_BYTES:
        return work(*args, leases)
    return await offload(nbytes, work, *args, LoopRoom(leases))


async def offload(
    nbytes: int, work: Callable[ParametersP, ReturnT], *args: ParametersP.args, **kwargs: ParametersP.kwargs
) -> ReturnT:
    """Calls `work`, in a thread if it has more than `OFFLOAD_BYTES` to go through.

    A request that is cancelled meanwhile still waits for the thread: it uses the request's slots.

    Raises:
        Unavailable: The system allows no more threads.
    """
    if nbytes <= OFFLOAD_BYTES:
        return work(*args, **kwargs)
    is_done: Future[None] = Future()

    def run() -> ReturnT:
        if not is_done.set_running_or_notify_cancel():
            raise RuntimeError("its request has ended")
        try:
            return work(*args, **kwargs)
        finally:
            is_done.set_result(None)

    try:
        running = asyncio.get_running_loop().run_in_executor(_THREADS, run)
    except RuntimeError as error:
        # The pool keeps the work for later, when the request's slots are others', unless one of its threads does it now.
        if not is_done.cancel():
            await _over(asyncio.wrap_future(is_done))
        raise Unavailable("the system allows no more threads") from error
    try:
        return await _over(running)
    finally:
        # An error that it holds leads back to this frame: left here, both would wait for the garbage collector.
        del running


async def _over(running: asyncio.Future[ReturnT]) -> ReturnT:
    """Returns what a thread's work returns; waits for its end where the request is cancelled, too."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
    finally:
        # As above.
        del running
