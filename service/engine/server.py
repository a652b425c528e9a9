"""The engine's end of the Unix socket: accepts gateways, turns their messages into inbox events, carries answers back.

Runs in the engine's I/O thread, an asyncio loop. Knows no device and no scheduling.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque

from service.arena import Segment
from service.engine.loop import EngineLoop
from service.engine.work import Attached, Client, Lost, Received
from service.link import Link, receive_hello
from service.messages import Hello, ToEngine, ToGateway

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0


class Outbox:
    """Carries answers from the engine's other threads to their links, waking the event loop once for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Link[ToEngine], ToGateway]] = deque()
        self._is_woken = False

    def post(self, link: Link[ToEngine], message: ToGateway) -> None:
        """Sends a message; any thread may call it."""
        self._waiting.append((link, message))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        # Cleared first: whoever appends after the last popleft wakes the loop again.
        self._is_woken = False
        while self._waiting:
            link, message = self._waiting.popleft()
            link.send(message)


class EngineServer:
    """Listens for gateways.

    Args:
        listener: A listening Unix socket, inherited from the supervisor: gateways that came early wait in its backlog.
        engine: Gets their messages.
    """

    def __init__(self, listener: socket.socket, engine: EngineLoop) -> None:
        self._listener = listener
        self._engine = engine
        self._outbox = Outbox(asyncio.get_running_loop())
        self._handshakes: set[asyncio.Task[None]] = set()
        self._links: set[Link[ToEngine]] = set()
        self._all_lost = asyncio.Event()
        self._all_lost.set()

    async def accept_forever(self) -> None:
        """Accepts gateways until cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            sock, _address = await loop.sock_accept(self._listener)
            sock.setblocking(False)
            task = loop.create_task(self._shake_hands(sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def close(self) -> None:
        """Sends what is still to be sent and closes every link."""
        await asyncio.sleep(0)
        for link in list(self._links):
            link.close()
        await self._all_lost.wait()

    async def _shake_hands(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello, fd = await receive_hello(sock, Hello)
            segment = _attach(fd, hello.segment_bytes)
        except (OSError, ValueError, TimeoutError) as error:
            logger.warning("a gateway's hello failed: %s", error)
            sock.close()
            return
        await self._connect(sock, hello, segment)

    async def _connect(self, sock: socket.socket, hello: Hello, segment: Segment) -> None:
        def on_message(message: ToEngine) -> None:
            self._engine.post(Received(client, message))

        def on_lost() -> None:
            self._links.discard(link)
            if not self._links:
                self._all_lost.set()
            self._engine.post(Lost(client))

        link: Link[ToEngine] = Link(ToEngine, on_message, on_lost)
        client = Client(f"gateway-{hello.gateway}", segment, lambda message: self._outbox.post(link, message))
        await asyncio.get_running_loop().connect_accepted_socket(lambda: link, sock)
        self._links.add(link)
        self._all_lost.clear()
        self._engine.post(Attached(client))


def _attach(fd: int, nbytes: int) -> Segment:
    try:
        return Segment.attach(fd, nbytes)
    except (OSError, ValueError):
        os.close(fd)
        raise
