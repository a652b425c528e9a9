"""Work that the pool of threads keeps although it could not start one is not done when its request has ended."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: this one's pool may have its threads.
SCRIPT = """
import asyncio
from tests.support.no_threads import no_more_threads
from tilewire.service.gateway.request.offload import OFFLOAD_BYTES, offload

async def main():
    done = []
    with no_more_threads():
        try:
            await offload(OFFLOAD_BYTES + 1, done.append, "of a request that ended")
        except RuntimeError as error:
            assert "can't start new thread" in str(error), error
    await offload(OFFLOAD_BYTES + 1, done.append, "next")
    print(done)

asyncio.run(main())
"""


def test_work_that_found_no_thread_is_not_done_later() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['next']\n"
