"""Tasks beside the work of a process: none fails unnoticed, and none outlives the work."""

from __future__ import annotations

import asyncio

import pytest

from tilewire.service.beside import run_beside


async def forever() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    raise RuntimeError("the task failed")


def test_a_task_that_fails_ends_the_work() -> None:
    is_cancelled = False

    async def work() -> None:
        nonlocal is_cancelled
        try:
            await forever()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    async def run() -> None:
        async with asyncio.timeout(20):
            await run_beside(work(), [forever(), failing()])

    with pytest.raises(RuntimeError, match="the task failed"):
        asyncio.run(run())
    assert is_cancelled


def test_tasks_end_with_the_work_and_may_end_before() -> None:
    steps: list[str] = []

    async def early() -> None:
        steps.append("early")

    async def late() -> None:
        try:
            await forever()
        finally:
            steps.append("late")

    async def work() -> None:
        # Turns of the loop for the other two: one that began, and one that ended.
        for _ in range(5):
            await asyncio.sleep(0)
        steps.append("work")

    async def run() -> None:
        async with asyncio.timeout(20):
            await run_beside(work(), [early(), late()])

    asyncio.run(run())
    assert steps == ["early", "work", "late"]
