"""Takes connections of a listening socket that all gateways share, so that each gateway has its share of them.

Whoever wakes first could take all that wait. So a gateway that has its share leaves the next connection to the others for a
moment. What is still there then it takes: the others are busy, or down. A gateway that is not ready takes none while others
are. Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Callable
from typing import Protocol, cast

from tilewire.service.ipc.connection_counts import ConnectionCounts
from tilewire.service.supervisor.listeners import BACKLOG, listen

logger = logging.getLogger(__name__)

# How long a connection is left to gateways that have fewer, and how many times in a row before it is taken nevertheless.
LEFT_S, PATIENCE = 0.001, 5
# How long connections are left to gateways that are ready by one that is not, before it looks whether any still is.
BEHIND_S = 0.02
MAX_DOUBLINGS = 10
# How long to wait when the system lets this process have no more descriptors: those of a flood come back at once.
FULL_S = 0.05
# Shortest time between two lines of the log that say so.
LOGGED_EVERY_S = 1.0
FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Connection(Protocol):
    """A protocol of asyncio.

    Attributes:
        on_lost: To be called when the connection is gone.
    """

    on_lost: Callable[[], None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's call."""
        ...


class Acceptor:
    """Takes connections of a door, which stays the caller's, until it is closed. uvicorn treats it like asyncio's servers."""

    def __init__(self, door: socket.socket, make: Callable[[], Connection], counts: ConnectionCounts) -> None:
        self._door = door
        self._make = make
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        # How many times in a row connections were left to others.
        self._num_left = 0
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._logged_s = -math.inf
        listen(door)
        self._loop.add_reader(door, self._on_waiting)

    def close(self) -> None:
        """Takes the connections that wait, which the system would reset with the socket, and no more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._door)
        if self._pause is not None:
            self._pause.cancel()
        for _ in range(BACKLOG):
            if not self._take():
                break

    async def wait_closed(self) -> None:
        """Waits for connections that are just beginning."""
        await asyncio.gather(*self._beginning)

    def _on_waiting(self) -> None:
        """A connection waits, or did: another gateway may have it by now."""
        if self._counts.is_behind:
            self._wait(BEHIND_S)
        elif self._counts.has_share:
            self._num_left += 1
            self._wait(LEFT_S)
        else:
            self._num_left = 0
            self._take()

    def _look_again(self) -> None:
        """Takes what the others have left for long, twice as many each time."""
        self._pause = None
        if self._num_left > PATIENCE and self._counts.has_share and not self._counts.is_behind:
            doublings = min(self._num_left - PATIENCE - 1, MAX_DOUBLINGS)
            if not all(self._take() for _ in range(1 << doublings)):
                self._num_left = 0
        if self._pause is None:
            self._loop.add_reader(self._door, self._on_waiting)

    def _on_lost(self) -> None:
        self._counts.add(-1)

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self._door)
        self._pause = self._loop.call_later(seconds, self._look_again)

    def _take(self) -> bool:
        """Takes one connection; whether there was one."""
        try:
            sock, _ = self._door.accept()
        except OSError as error:
            # Otherwise another gateway has it, or the client is gone: the system hands on what became of its connection.
            if error.errno in FULL and not self._is_closed:
                self._log(error)
                self._wait(FULL_S)
            return False
        sock.setblocking(False)
        self._counts.add(1)
        task = self._loop.create_task(self._begin(sock))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)
        return True

    def _log(self, error: OSError) -> None:
        if self._loop.time() - self._logged_s >= LOGGED_EVERY_S:
            self._logged_s = self._loop.time()
            logger.error("no connection can be taken: %s", error)

    async def _begin(self, sock: socket.socket) -> None:
        connection = self._make()
        connection.on_lost = self._on_lost
        try:
            await self._loop.connect_accepted_socket(lambda: cast("asyncio.BaseProtocol", connection), sock)
        except OSError:
            # It is gone already.
            sock.close()
            self._on_lost()
