"""The gateway process: `python -m service.gateway`, started by the supervisor. Owns its life as named phases.

settings → arena → engine links → listen → serve → drain → exit
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from service import __version__, child, log
from service.arena import Arena, Segment
from service.gateway.admission import Admission
from service.gateway.app import create_app
from service.gateway.context import Gateway
from service.gateway.engine_client import EngineClient
from service.gateway.engines import Engines
from service.gateway.metrics import GatewayMetrics
from service.gateway.protocol import DRAIN_GRACE_S, TilewireProtocol
from service.link import Link
from service.messages import Welcome
from service.settings import GatewaySettings


class GatewayServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: the supervisor says when to drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def make_gateway(
    settings: GatewaySettings, clients: list[EngineClient], arena: Arena, metrics: GatewayMetrics
) -> Gateway:
    """Puts the parts together."""
    return Gateway(
        settings=settings,
        version=__version__,
        engines=Engines(clients),
        arena=arena,
        admission=Admission(arena, settings.max_in_flight, settings.max_body_bytes),
        metrics=metrics,
        metrics_folder=settings.metrics_folder,
    )


def make_server(gateway: Gateway) -> GatewayServer:
    """The HTTP server around the application."""
    return GatewayServer(
        uvicorn.Config(
            create_app(gateway),
            http=protocol_for(gateway.settings),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=gateway.settings.keep_alive_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=gateway.settings.drain_timeout_s,  # type: ignore[arg-type]
        )
    )


def protocol_for(settings: GatewaySettings) -> type[TilewireProtocol]:
    """The protocol with its limits; uvicorn wants a class."""
    limits = {
        "patience_s": settings.body_timeout_s,
        "min_body_bytes_per_s": settings.min_body_bytes_per_s,
        "max_connections": settings.max_connections,
    }
    return type("LimitedProtocol", (TilewireProtocol,), limits)


async def drain_when_told(draining: asyncio.Event, gateway: Gateway, server: GatewayServer) -> None:
    """Stops admitting, waits for what is under way, keeps answering 503 for a moment, then closes the door."""
    await draining.wait()
    gateway.admission.is_draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(gateway.settings.drain_timeout_s):
            await gateway.admission.drain()
    await asyncio.sleep(DRAIN_GRACE_S)
    server.should_exit = True


async def say_ready(attached: asyncio.Event, control: Link[child.Drain]) -> None:
    """Tells the supervisor that this gateway computes, once every engine has its arena."""
    await attached.wait()
    control.send(child.Ready("every engine is attached"))


async def serve(settings: GatewaySettings) -> None:
    """Runs the gateway until it is drained."""
    metrics = GatewayMetrics()
    segment = Segment.create(f"tilewire-gateway-{settings.index}", settings.segment_bytes)
    if settings.huge_pages:
        nbytes = segment.take_huge_pages()
        logging.getLogger("tilewire.gateway").info("huge pages hold %d bytes of %d", nbytes, segment.nbytes)
    attached = asyncio.Event()

    def on_change(welcome: Welcome, is_up: bool) -> None:
        metrics.observe_engine(welcome, is_up)
        if all(client.welcome is not None for client in clients):
            attached.set()

    clients = [EngineClient(settings.index, path, segment, on_change) for path in settings.engine_paths]
    gateway = make_gateway(settings, clients, Arena(segment), metrics)
    gateway.metrics.observe_load(0, gateway.arena)
    server = make_server(gateway)

    draining = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, draining.set)
    control = await child.connect_control(draining.set)
    background = [asyncio.create_task(client.run()) for client in clients]
    background.append(asyncio.create_task(drain_when_told(draining, gateway, server)))
    background.append(asyncio.create_task(say_ready(attached, control)))
    await server.serve(sockets=[socket.socket(fileno=settings.listen_fd)])
    metrics.flush()
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)


def main() -> int:
    """Runs the process; returns its exit status."""
    # A terminal's Ctrl-C is the supervisor's to handle: it drains us first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = child.read_settings(GatewaySettings)
    log.configure(settings.log, process=f"gateway-{settings.index}")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
