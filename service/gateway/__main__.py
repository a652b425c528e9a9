"""The HTTP gateway's process: `python -m tilewire.service.gateway`, started by the supervisor. Owns its HTTP servers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from tilewire.service.beside import run_beside
from tilewire.service.config.process import TlsSettings
from tilewire.service.gateway import process
from tilewire.service.gateway.api.health import why_not_ready
from tilewire.service.gateway.app import TilewireApp, create_app, create_metrics_app
from tilewire.service.gateway.connection.acceptor import Acceptor, Connection
from tilewire.service.gateway.connection.limits import EXCESS_IDLE_S
from tilewire.service.gateway.connection.protocol import TilewireProtocol
from tilewire.service.gateway.connection.receive import SCRATCH_BYTES
from tilewire.service.gateway.connection.tls import Handshakes, TlsTransport
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.ipc.connection_counts import ConnectionCounts
from tilewire.service.tls import CurrentContext

# Number of the option in glibc's malloc.h.
M_ARENA_MAX = -8
# How long connections that waited when the port was closed have to bring a request, in seconds.
CLOSING_S = 0.1


class GatewayServer(uvicorn.Server):
    """uvicorn's server with acceptors of ours, and without its signal handlers; see `process.Server` for the calls.

    Args:
        gateway: Parts.
        app: Application that it serves.
        door: Listening socket; None where `serve` gets it.
        counts: Connections of all gateways that share the socket, and which of them are ready.
        tls: Files of TLS; None for none.

    Attributes:
        is_listening: Set when it takes connections.
    """

    def __init__(
        self,
        gateway: Gateway,
        app: ASGIApp,
        door: socket.socket | None = None,
        counts: ConnectionCounts | None = None,
        tls: TlsSettings | None = None,
    ) -> None:
        self._tls = None if tls is None else CurrentContext(tls, gateway.metrics.follow_file("certificate"))
        self._counts = counts or ConnectionCounts()
        super().__init__(make_config(gateway, app, self._tls, self._counts))
        self._gateway = gateway
        self.is_listening = asyncio.Event()
        self._door = door

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until it is closed; keeps its certificate current."""
        keeping = [] if self._tls is None else [self._tls.keep_current()]
        serving = super().serve(sockets if self._door is None else [self._door])
        await run_beside(serving, keeping)

    def observe_readiness(self) -> None:
        self._counts.set_ready(is_ready=why_not_ready(self._gateway) is None)

    def close(self) -> None:
        if self.is_listening.is_set():
            for acceptor in self.servers:
                acceptor.close()
            if self._door is not None:
                self._door.close()
            asyncio.get_running_loop().call_later(CLOSING_S, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self.should_exit = True

    def abort(self) -> None:
        self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's call."""
        await super().startup([])
        self.servers += [Acceptor(door, self._make_connection, self._counts) for door in sockets or ()]  # type: ignore[misc]
        self.is_listening.set()

    def _make_connection(self) -> Connection:
        """As uvicorn makes them."""
        make = cast("Callable[..., Connection]", self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's call; requests that it did not wait for end before the loop does, as its tasks do."""
        await super().shutdown(sockets)
        for request in list(self.server_state.tasks):
            request.cancel()
        await asyncio.sleep(0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def make_config(gateway: Gateway, app: ASGIApp, tls: CurrentContext | None, counts: ConnectionCounts) -> uvicorn.Config:
    """Returns uvicorn's settings."""
    config = uvicorn.Config(
        app,
        http=protocol_for(gateway, app),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=gateway.settings.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=gateway.settings.drain_timeout_s,  # type: ignore[arg-type]
    )
    config.load()
    if tls is not None:
        http, settings, handshakes = config.http_protocol_class, gateway.settings, Handshakes()

        def make(**arguments: Any) -> TlsTransport:
            # The protocol has its connection, and counts it, behind the handshake.
            is_excess = counts.own > settings.max_connections
            handshake_s = min(EXCESS_IDLE_S, settings.body_timeout_s) if is_excess else settings.body_timeout_s
            return TlsTransport(http(**arguments), tls.context, handshake_s, handshakes)

        config.http_protocol_class = make  # type: ignore[assignment]
    return config


def protocol_for(gateway: Gateway, app: ASGIApp) -> type[TilewireProtocol]:
    """The protocol with its limits and the app's ops; uvicorn requires a class."""
    settings = gateway.settings
    limits: dict[str, object] = {
        "timeout_s": settings.body_timeout_s,
        "min_body_bytes_per_s": settings.min_body_bytes_per_s,
        "max_body_s": settings.max_body_s,
        "max_connections": settings.max_connections,
        "gateway": gateway,
        "scratch": memoryview(bytearray(SCRATCH_BYTES)),
    }
    if isinstance(app, TilewireApp):
        limits["find_target"] = staticmethod(app.find_target)
    return type("LimitedProtocol", (TilewireProtocol,), limits)


def open_servers(gateway: Gateway) -> Sequence[GatewayServer]:
    """The servers of this gateway: the one that serves, and that of `--metrics-port`."""
    inherited = gateway.settings.inherited
    door = socket.socket(fileno=inherited.listener)
    counts = ConnectionCounts(inherited.connections, gateway.settings.index)
    servers = [GatewayServer(gateway, create_app(gateway), door, counts, gateway.settings.tls)]
    if inherited.metrics_listener >= 0:
        door = socket.socket(fileno=inherited.metrics_listener)
        servers.append(GatewayServer(gateway, create_metrics_app(gateway), door))
    return servers


def use_one_arena() -> None:
    """Has all threads allocate from one heap.

    glibc gives each thread a heap of its own. As the interpreter's lock lets one thread run at a time, more heaps win nothing.
    Each of the two threads of `offload` kept 3 MB of free memory that nobody else could use (malloc_info during `make soak`).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)


if __name__ == "__main__":
    use_one_arena()
    sys.exit(process.run(open_servers))
