"""Messages to an engine that cannot be encoded, beside others of the same write; and requests of one that has gone."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from tests.support.scripted_engines import JOB, Held, Stays
from tilewire.service.errors import InternalError, Unavailable
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.client import EngineClient, Reply, state_of
from tilewire.service.gateway.engines.templates import MAX_TEMPLATES
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.link import Link, receive_hello
from tilewire.service.ipc.messages import (
    DescribeTensor,
    Done,
    ForgetTemplate,
    GetTensor,
    Hello,
    Job,
    Refused,
    Template,
    Tensors,
    Timings,
    ToEngine,
    Welcome,
    encode_frame,
)
from tilewire.service.ops.op import TensorType

TEMPLATE, OFFSETS = JOB
# One more than MessagePack can carry.
TOO_LARGE = 2**64
# Above the largest number of a process.
GONE = 2**22 + 1


class Scene:
    """A client, and an engine behind a real socket that answers everything.

    Attributes:
        client: The client, connected.
        received: Messages that the engine got.
        lost: Set when the client has lost the engine.
    """

    def __init__(self, segment: Segment, pid: int = 0) -> None:
        self.received: list[Any] = []
        self._pid = pid
        self._address = f"\0tilewire-test-client-{os.getpid()}"
        self._ready, self.lost = asyncio.Event(), asyncio.Event()
        changes = {True: self._ready, False: self.lost}
        self.client = EngineClient(0, self._address, segment, lambda _welcome, is_ready: changes[is_ready].set())

    async def play(self, scene: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self._address)
            listener.listen()
            listener.setblocking(False)
            running = asyncio.create_task(self.client.run())
            sock, _ = await loop.sock_accept(listener)
            _, fd = await receive_hello(sock, Hello)
            os.close(fd)
            self._link: Link[Any] = Link(ToEngine, self._on_message, lambda: None)
            await loop.connect_accepted_socket(lambda: self._link, sock)
            self._link.send(Welcome(0, "cpu", "cpu", "", "", "", pid=self._pid))
            await self._ready.wait()
            await scene
            self.hang_up()
            running.cancel()
            await asyncio.wait((running,))

    def hang_up(self) -> None:
        """Closes the engine's end."""
        self._link.close()

    def _on_message(self, message: Any) -> None:
        self.received.append(message)
        if isinstance(message, Job):
            self._link.send(Done(message.id, Timings()))
        elif not isinstance(message, Template | ForgetTemplate):
            self._link.send(Tensors(message.id, ()))


async def ended(requests: list[tuple[int, asyncio.Future[Reply]]]) -> list[type]:
    outcomes = await asyncio.gather(*(future for _, future in requests), return_exceptions=True)
    return [type(one) for one in outcomes]


def test_a_message_that_cannot_be_encoded_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    segment = Segment.create("test", 4096)

    async def main() -> None:
        scene = Scene(segment)
        client = scene.client

        caller = Caller(Stays(), Held())

        async def send() -> None:
            requests = [
                client.submit(TEMPLATE, OFFSETS, caller),
                client.submit(TEMPLATE, (TOO_LARGE,), caller),
                client.send(GetTensor(0, "\ud800", TensorType("float32", (1,)), 0)),
                client.send(DescribeTensor(0, "w")),
                client.submit(TEMPLATE, OFFSETS, caller),
            ]
            assert await ended(requests) == [Done, InternalError, InternalError, Tensors, Done]
            assert client.outstanding == 0

        await scene.play(send())
        assert [type(one) for one in scene.received] == [Template, Job, DescribeTensor, Job]

    asyncio.run(main())
    segment.close()
    assert [record.message for record in caplog.records] == ["a message to an engine cannot be encoded"] * 2
    assert all(record.exc_info for record in caplog.records)


def test_an_engine_keeps_so_many_templates_whatever_the_gateway_still_uses() -> None:
    segment = Segment.create("test", 4096)
    templates = [msgspec.structs.replace(TEMPLATE, id=number) for number in range(1, MAX_TEMPLATES + 3)]

    async def main() -> None:
        scene = Scene(segment)
        caller = Caller(Stays(), Held())

        async def send() -> None:
            # The first one is used all the time; the second is used again when the engine has forgotten it.
            for template in (*templates, templates[1]):
                requests = [scene.client.submit(one, OFFSETS, caller) for one in (template, templates[0])]
                assert await ended(requests) == [Done, Done]

        await scene.play(send())
        held: set[int] = set()
        for message in scene.received:
            if isinstance(message, Template):
                held.add(message.id)
            elif isinstance(message, ForgetTemplate):
                held.remove(message.id)
            else:
                assert message.template in held
            assert len(held) <= MAX_TEMPLATES + 1
        forgotten = [one.id for one in scene.received if isinstance(one, ForgetTemplate)]
        assert forgotten == [2, 3, 4]
        assert len(held) == MAX_TEMPLATES

    asyncio.run(main())
    segment.close()


def test_no_job_leaves_without_a_template_that_cannot_be_encoded() -> None:
    segment = Segment.create("test", 4096)
    endless = msgspec.structs.replace(TEMPLATE, id=2, flops=TOO_LARGE)

    async def main() -> None:
        scene = Scene(segment)
        caller = Caller(Stays(), Held())

        async def send() -> None:
            requests = [scene.client.submit(template, OFFSETS, caller) for template in (endless, TEMPLATE, endless)]
            assert await ended(requests) == [InternalError, Done, InternalError]

        await scene.play(send())
        assert [one.template for one in scene.received if isinstance(one, Job)] == [TEMPLATE.id]

    asyncio.run(main())
    segment.close()


class Silent(Scene):
    """An engine that answers nothing."""

    def _on_message(self, message: Any) -> None:
        self.received.append(message)


def test_a_request_ends_with_the_process_of_its_engine_and_not_with_its_socket() -> None:
    """The driver lets kernels of a killed process go on for a while: a slot must not be anybody else's meanwhile."""
    segment = Segment.create("test", 4096)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    async def main() -> None:
        scene = Silent(segment, process.pid)

        async def send() -> None:
            _, future = scene.client.submit(TEMPLATE, OFFSETS, Caller(Stays(), Held()))
            _, gone = scene.client.submit(TEMPLATE, OFFSETS, Caller(Stays(), Held()))
            gone.cancel()
            scene.hang_up()
            await asyncio.wait_for(scene.lost.wait(), 30)
            assert scene.client.outstanding == 0
            await asyncio.wait((future,), timeout=0.1)
            assert not future.done()
            process.kill()
            # Nobody has collected the process yet: it need not be.
            with pytest.raises(Unavailable, match="restarted"):
                await asyncio.wait_for(future, 30)

        await scene.play(send())

    try:
        asyncio.run(main())
    finally:
        process.kill()
        process.wait()
    segment.close()


@pytest.mark.parametrize("pid", [0, GONE], ids=["none", "gone"])
def test_a_request_of_an_engine_that_has_ended_ends_at_once(pid: int) -> None:
    segment = Segment.create("test", 4096)

    async def main() -> None:
        scene = Silent(segment, pid)

        async def send() -> None:
            _, future = scene.client.submit(TEMPLATE, OFFSETS, Caller(Stays(), Held()))
            scene.hang_up()
            with pytest.raises(Unavailable, match="restarted"):
                await asyncio.wait_for(future, 30)

        await scene.play(send())

    asyncio.run(main())
    segment.close()


def test_a_refusal_is_reported_once_and_stays_in_the_state_of_the_engine() -> None:
    segment = Segment.create("test", 4096)
    reasons: list[str] = []

    async def main() -> None:
        address, loop = f"\0tilewire-test-refused-{os.getpid()}", asyncio.get_running_loop()
        client = EngineClient(0, address, segment, on_refused=reasons.append)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
            running = asyncio.create_task(client.run())
            for _ in range(2):
                sock, _ = await asyncio.wait_for(loop.sock_accept(listener), 30)
                with sock:
                    _, fd = await receive_hello(sock, Hello)
                    os.close(fd)
                    assert state_of(client)["state"] == ("refusing" if reasons else "starting")
                    sock.send(encode_frame([Refused("no memory")]))
            running.cancel()
            await asyncio.wait((running,))

    asyncio.run(main())
    segment.close()
    assert reasons == ["no memory"]
