"""The sockets that the supervisor opens for its children: of HTTP, bound; of engines, listening."""

from __future__ import annotations

import asyncio
import errno
import socket
import time

import structlog

BACKLOG = 4096

# How long a port may be taken at the start, and how often it is tried, in seconds.
TAKEN_S, TRY_AGAIN_S = 5.0, 0.1


class StartError(Exception):
    """The service cannot start; the message says why."""


class PortTaken(StartError):
    """Another process listens there.

    Attributes:
        port: Number of the port.
    """

    def __init__(self, message: str, port: int) -> None:
        super().__init__(message)
        self.port = port


async def bind_first(host: str, port: int, logger: structlog.stdlib.BoundLogger) -> socket.socket:
    """Binds the socket of HTTP, before anything starts.

    Waits a moment for a port that is taken, and says so: a service that was killed may have processes that are only just
    ending.

    Raises:
        StartError: The address cannot be had.
    """
    end_s = time.monotonic() + TAKEN_S
    is_told = False
    while True:
        try:
            return bind(host, port)
        except PortTaken:
            if time.monotonic() > end_s:
                raise
        if not is_told:
            logger.warning("the port is taken: trying again", port=port, for_s=TAKEN_S)
            is_told = True
        await asyncio.sleep(TRY_AGAIN_S)


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Binds, and leaves listening to the gateways: until one can answer, connections are refused.

    Raises:
        StartError: The address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host} port {port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(message, port) from error
        raise StartError(message) from error
    listener.setblocking(False)
    return listener


def address_of(door: socket.socket) -> str:
    """Host and port, as they stand in a URL."""
    host, port = door.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_locally() -> socket.socket:
    """Listens on a Unix socket whose name the kernel chooses; no file, so nothing to write and nothing to sweep.

    Gateways that come before the engine wait in its backlog. The engine takes connections of its own user only.
    """
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind("")
    door.listen(BACKLOG)
    return door
