"""The sockets that the supervisor opens for its children: of HTTP and gRPC, bound; of engines, listening."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable

import structlog

BACKLOG = 4096

# How long a port may be taken at the start, and how often it is tried, in seconds.
TAKEN_S, TRY_AGAIN_S = 5.0, 0.1


class StartError(Exception):
    """The service cannot start; the message says why."""


class AddressRefused(StartError):
    """The system gives no socket for an address.

    Attributes:
        port: Number of the port.
    """

    def __init__(self, message: str, port: int) -> None:
        super().__init__(message)
        self.port = port


class PortTaken(AddressRefused):
    """Another process listens there."""


def bind(host: str, port: int, option: int = socket.SO_REUSEADDR) -> socket.socket:
    """Binds, and leaves listening to the gateways: until one can answer, connections are refused.

    Raises:
        StartError: The address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host} port {port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(message, port) from error
        raise AddressRefused(message, port) from error
    listener.setblocking(False)
    return listener


def listen(door: socket.socket) -> None:
    """Listens on a bound socket.

    `bind` lets two services that start at once have one port: the system refuses it to the second one that listens.

    Raises:
        PortTaken: Another process listens there.
    """
    try:
        door.listen(BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        host, port = door.getsockname()[:2]
        raise PortTaken(f"cannot listen on {host} port {port}: another program took it first", port) from error


def reserve(host: str, port: int) -> socket.socket:
    """Binds a port that a library takes by its number, and keeps it for this service.

    The library binds it again, so both need SO_REUSEPORT. That alone would also share it with another service of this user,
    and the system would spread connections over both. So the port is bound without it first, which fails where any process
    listens. It fails from here on for others, too: this socket has no SO_REUSEADDR, so nobody shares it by that.

    Raises:
        StartError: The address cannot be had.
    """
    with bind(host, port) as free:
        port = free.getsockname()[1]
    return bind(host, port, socket.SO_REUSEPORT)


async def bind_first(
    host: str,
    port: int,
    logger: structlog.stdlib.BoundLogger,
    bind_once: Callable[[str, int], socket.socket] = bind,
) -> socket.socket:
    """Binds the socket of HTTP or of gRPC, before anything starts.

    Waits a moment for a port that is taken, and says so: a service that was killed may have processes that are only just
    ending.

    Args:
        host: Address.
        port: Port; 0 for a free one.
        logger: Gets the warning.
        bind_once: `bind` or `reserve`.

    Raises:
        StartError: The address cannot be had.
    """
    end_s = time.monotonic() + TAKEN_S
    is_told = False
    while True:
        try:
            return bind_once(host, port)
        except PortTaken:
            if time.monotonic() > end_s:
                raise
        if not is_told:
            logger.warning("the port is taken: trying again", port=port, for_s=TAKEN_S)
            is_told = True
        await asyncio.sleep(TRY_AGAIN_S)


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
