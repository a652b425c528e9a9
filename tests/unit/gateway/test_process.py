"""The life of a gateway's process: its servers, and the tasks beside them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from tilewire.service.config.process import Inherited
from tilewire.service.config.settings import Settings
from tilewire.service.gateway.process import EXIT_FAILED, run_beside
from tilewire.service.ipc.board import create_board
from tilewire.service.ipc.messages import encode_frame
from tilewire.service.supervisor import child

# A gateway with one server: it serves until it is closed, and fails when it is to take note of the drain.
CODE = """
import asyncio
import sys
from tilewire.service.gateway import process

class Server:
    def __init__(self):
        self.is_listening = asyncio.Event()

    async def serve(self):
        await asyncio.Event().wait()

    def observe_readiness(self):
        raise RuntimeError("the server took no note")

sys.exit(process.run(lambda gateway: [Server()]))
"""


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


def test_a_gateway_whose_task_fails_says_so_and_ends() -> None:
    board = create_board()
    settings = Settings(arena_bytes=2**24).gateway(0, Inherited(board=board), [])
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", CODE]
    with ours, theirs, subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE) as process:
        try:
            child.send_settings(ours, settings)
            ours.sendall(encode_frame([child.Drain()]))
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    os.close(board)
    assert process.returncode == EXIT_FAILED
    assert b"the gateway cannot go on" in errors
    assert b"the server took no note" in errors
