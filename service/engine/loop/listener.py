"""Accepts gateways on the Unix socket and shakes hands; then the mailbox has their sockets.

Runs in the engine's main thread, an asyncio loop. Handles the first message only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct

from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.link import receive_hello
from tilewire.service.ipc.messages import Hello, Refused, encode_frame

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0

# Part of a segment whose pages are taken in the background as soon as a gateway is attached. It is room for the first
# burst of large requests: slots are taken by the lowest address.
EARLY_BYTES = 2**27
EARLY_SHARE = 8
# Pages that are taken at once: about two milliseconds, in which no other gateway shakes hands.
STEP_BYTES = 2**22

# Pause behind a connection that there was no descriptor for.
RETRY_S = 0.5

# `struct ucred`: process, user and group.
_CREDENTIALS = struct.Struct("=iII")


class EngineServer:
    """Listens for gateways.

    Args:
        listener: A listening Unix socket, inherited from the supervisor: gateways that came early wait in its backlog.
        mailbox: Gets their sockets.
    """

    def __init__(self, listener: socket.socket, mailbox: Mailbox) -> None:
        self._listener = listener
        self._mailbox = mailbox
        self._handshakes: set[asyncio.Task[None]] = set()

    async def accept_forever(self) -> None:
        """Accepts gateways until cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            try:
                sock, _address = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.error("a gateway cannot connect: %s", error.strerror)  # noqa: TRY400  (the reason is the whole story)
                await asyncio.sleep(RETRY_S)
                continue
            sock.setblocking(False)
            if _user_of(sock) != os.geteuid():
                logger.warning("another user connected to the engine's socket")
                sock.close()
                continue
            task = loop.create_task(self._shake_hands(sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello, fd = await receive_hello(sock, Hello)
        except (OSError, ValueError, TimeoutError) as error:
            logger.warning("a gateway's hello failed: %s", error)
            sock.close()
            return
        try:
            segment = _attach(fd, hello.segment_bytes)
        except OSError as error:
            _refuse(sock, f"{hello.segment_bytes} bytes of shared memory cannot be mapped: {error.strerror}")
            return
        self._mailbox.connect(sock, hello, segment)
        early_bytes = min(EARLY_BYTES, segment.nbytes // EARLY_SHARE) // STEP_BYTES * STEP_BYTES
        # Closed when the gateway is gone.
        with contextlib.suppress(ValueError):
            for begin in range(0, early_bytes, STEP_BYTES):
                segment.take_pages(begin, STEP_BYTES)
                await asyncio.sleep(0)


def _user_of(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    return int(uid)


def _refuse(sock: socket.socket, reason: str) -> None:
    """Sends the gateway the reason, which is its to log, and closes the socket."""
    with sock, contextlib.suppress(OSError):
        sock.send(encode_frame([Refused(reason)]))


def _attach(fd: int, nbytes: int) -> Segment:
    try:
        return Segment.attach(fd, nbytes)
    except (OSError, ValueError):
        os.close(fd)
        raise
