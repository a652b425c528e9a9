"""What a child does before its settings come, and when its supervisor is gone."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tilewire.service.supervisor.child import EXIT_ORPHAN

CODE = """
import sys
import msgspec
from tilewire.service.config.process import EngineSettings, GatewaySettings
from tilewire.service.{side} import process
from tilewire.service.ipc.messages import FrameDecoder, ToEngine, ToGateway
from tilewire.service.ops.program.definition import Definition
from tilewire.service.ops.registry import OPS
from tilewire.service.supervisor import child

try:
    child.read_settings({settings})
except EOFError:
    pass
called = []
sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
FrameDecoder(ToEngine)
FrameDecoder(ToGateway)
for op in OPS.values():
    msgspec.convert({{}}, op.options)
try:
    msgspec.convert({{}}, Definition)
except msgspec.ValidationError:
    pass
sys.setprofile(None)
print(*called)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("side", "settings"), [("engine", "EngineSettings"), ("gateway", "GatewaySettings")])
def test_types_are_built_before_there_are_threads(side: str, settings: str) -> None:
    # A type that another thread builds, which calls this function, crashes the thread that uses it.
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        code = CODE.format(side=side, settings=settings)
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=theirs.fileno(), capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    called = done.stdout.split()
    assert "__init__" in called
    assert "get_class_annotations" not in called


HANGS = """
import asyncio
from tilewire.service.supervisor import child

async def main():
    control = await child.Control.open(lambda: print("told to drain", flush=True), orphan_s=0.1)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_one_that_hangs_ends_when_its_supervisor_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", HANGS], stdin=theirs.fileno(), stdout=subprocess.PIPE, text=True
        )
    ours.close()
    try:
        told, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (told, process.returncode) == ("told to drain\n", EXIT_ORPHAN)
