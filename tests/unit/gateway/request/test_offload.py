"""Work in a thread: its result, its error, and where no thread can be started."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from tilewire.service.gateway.request.offload import OFFLOAD_BYTES, offload

# In a process of its own: this one's pool may have its threads.
SCRIPT = """
import asyncio
from tests.support.no_threads import no_more_threads
from tilewire.service.errors import Unavailable
from tilewire.service.gateway.request.offload import OFFLOAD_BYTES, offload

async def main():
    done = []
    with no_more_threads():
        try:
            await offload(OFFLOAD_BYTES + 1, done.append, "of a request that ended")
        except Unavailable as error:
            assert "no more threads" in str(error), error
    await offload(OFFLOAD_BYTES + 1, done.append, "next")
    print(done)

asyncio.run(main())
"""


def test_work_that_found_no_thread_is_not_done_later() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['next']\n"


def test_results_and_errors_are_those_of_the_work() -> None:
    async def ask() -> None:
        assert await offload(OFFLOAD_BYTES + 1, divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await offload(OFFLOAD_BYTES + 1, divmod, 7, 0)

    asyncio.run(ask())


def test_an_error_leaves_no_garbage() -> None:
    """What it leads to holds memory of the request."""

    class Room:
        pass

    def fail(_: Room) -> None:
        raise ValueError("of the work")

    async def ask() -> weakref.ref[Room]:
        room = Room()
        with pytest.raises(ValueError, match="of the work"):
            await offload(OFFLOAD_BYTES + 1, fail, room)
        return weakref.ref(room)

    gc.disable()
    try:
        assert asyncio.run(ask())() is None
    finally:
        gc.enable()
