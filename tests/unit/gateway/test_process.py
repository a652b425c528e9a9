"""The life of a gateway's process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tilewire.service.config.process import Inherited
from tilewire.service.config.settings import Settings
from tilewire.service.gateway.process import EXIT_FAILED
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
