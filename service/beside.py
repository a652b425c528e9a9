"""Runs tasks beside the work of a process, of which none fails unnoticed. Each process of the service has its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def run_beside(work: Coroutine[Any, Any, object], background: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs work to its end, and tasks beside it for as long.

    A task may end before the work does. One that fails ends the work: without it keys or certificates would stay as they are,
    or nobody be let in, and nobody would notice.

    Raises:
        Exception: The work or a task failed.
    """
    working = asyncio.create_task(work)
    tasks = [working, *(asyncio.create_task(one) for one in background)]
    running: set[asyncio.Task[Any]] = set(tasks)
    try:
        while not working.done():
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
