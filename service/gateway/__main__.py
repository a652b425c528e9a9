"""The gateway process: `python -m tilewire.service.gateway`, started by the supervisor. Owns its life as named phases.

settings → arena → engine links → listen → serve → drain → exit
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import signal
import socket
import ssl
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from tilewire._version import __version__
from tilewire.service.config.process import GatewaySettings, TracingSettings
from tilewire.service.gateway.app import TilewireApp, create_app, create_metrics_app
from tilewire.service.gateway.auth.authenticator import Authenticator
from tilewire.service.gateway.auth.quotas import Quotas, UsagePage
from tilewire.service.gateway.connection.limits import DRAIN_GRACE_S
from tilewire.service.gateway.connection.protocol import TilewireProtocol
from tilewire.service.gateway.connection.receive import SCRATCH_BYTES
from tilewire.service.gateway.engines.busy_poll import Poller
from tilewire.service.gateway.engines.client import EngineClient
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.gateway.request.room import Room
from tilewire.service.gateway.telemetry.metrics import GatewayMetrics
from tilewire.service.gateway.telemetry.tracing import Recorder
from tilewire.service.ipc.arena import Arena, Segment
from tilewire.service.ipc.messages import Welcome
from tilewire.service.keys import KeysError
from tilewire.service.supervisor import child
from tilewire.service.supervisor.listeners import BACKLOG
from tilewire.service.telemetry import log
from tilewire.service.tls import TlsError, keep_certificate_current, make_context

logger = logging.getLogger(__name__)

EXIT_FAILED = 1

# How long requests may take to end when the supervisor is gone.
ORPHANS_DRAIN_S = 1.0


class GatewayServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: the supervisor says when to drain.

    Attributes:
        is_listening: Set when it takes connections.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's call."""
        await super().startup(sockets)
        self.is_listening.set()

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
        admission=Admission(Room(arena, settings.room_timeout_s), settings.max_in_flight, settings.max_body_bytes),
        metrics=metrics,
        authenticator=make_authenticator(settings),
        recorder=None if settings.tracing is None else open_recorder(settings.tracing, settings.index),
    )


def make_authenticator(settings: GatewaySettings) -> Authenticator:
    """Makes the authenticator, which counts usage on the page that all gateways share.

    Raises:
        KeysError: The file cannot be used.
    """
    if settings.api_keys_file is None:
        return Authenticator(is_read_only=settings.is_read_only)
    usage = mmap.mmap(settings.inherited.usage, 0)
    return Authenticator(
        Path(settings.api_keys_file),
        keyless=settings.keyless,
        is_read_only=settings.is_read_only,
        quotas=Quotas(UsagePage(usage, settings.index)),
    )


def open_recorder(tracing: TracingSettings, index: int) -> Recorder | None:
    """Returns the recorder of spans; None when its packages are missing, which the supervisor has reported."""
    try:
        # Imported here and not above: the packages are an extra, and cost every gateway's start.
        from tilewire.service.gateway.telemetry.otlp import OtlpRecorder  # noqa: PLC0415
    except ModuleNotFoundError:
        return None
    return OtlpRecorder(tracing, __version__, index)


def make_server(gateway: Gateway, app: ASGIApp, tls: ssl.SSLContext | None = None) -> GatewayServer:
    """The HTTP server around an application."""
    config = uvicorn.Config(
        app,
        http=protocol_for(gateway, app),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=gateway.settings.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=gateway.settings.drain_timeout_s,  # type: ignore[arg-type]
    )
    config.load()
    config.ssl = tls
    return GatewayServer(config)


def protocol_for(gateway: Gateway, app: ASGIApp) -> type[TilewireProtocol]:
    """The protocol with its limits and the app's ops; uvicorn wants a class."""
    settings = gateway.settings
    limits = {
        "patience_s": settings.body_timeout_s,
        "min_body_bytes_per_s": settings.min_body_bytes_per_s,
        "max_body_s": settings.max_body_s,
        "max_connections": settings.max_connections,
        "gateway": gateway,
        "scratch": memoryview(bytearray(SCRATCH_BYTES)),
        "ops": app.ops if isinstance(app, TilewireApp) else {},
    }
    return type("LimitedProtocol", (TilewireProtocol,), limits)


def open_servers(gateway: Gateway, tls: ssl.SSLContext | None) -> dict[GatewayServer, socket.socket]:
    """The servers of this gateway, each with its door: the one that serves, and that of `--metrics-port`."""
    inherited = gateway.settings.inherited
    servers = {make_server(gateway, create_app(gateway), tls): socket.socket(fileno=inherited.listener)}
    if inherited.metrics_listener >= 0:
        door = socket.socket(fileno=inherited.metrics_listener)
        servers[make_server(gateway, create_metrics_app(gateway))] = door
    return servers


async def drain_when_told(
    draining: asyncio.Event, gateway: Gateway, servers: Iterable[GatewayServer], control: child.Control
) -> None:
    """Stops admitting, waits for what is under way, keeps answering 503 for a moment, then closes the door.

    Without a supervisor it closes the door first, and waits for a moment only: another service may want the port, and the
    engines go as well.
    """
    await draining.wait()
    gateway.admission.is_draining = True
    if control.is_lost:
        for server in servers:
            server.should_exit = True
        await asyncio.sleep(ORPHANS_DRAIN_S)
        for server in servers:
            server.force_exit = True
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(gateway.settings.drain_timeout_s):
            await gateway.admission.drain()
    await asyncio.sleep(DRAIN_GRACE_S)
    for server in servers:
        server.should_exit = True


async def say_ready(attached: asyncio.Event, servers: Iterable[GatewayServer], control: child.Control) -> None:
    """Sends `Ready` to the supervisor, once this gateway listens and every engine has its arena."""
    await attached.wait()
    for server in servers:
        await server.is_listening.wait()
    child.settle()
    control.send(child.Ready("every engine is attached"))


async def serve(settings: GatewaySettings) -> None:
    """Runs the gateway until it is drained."""
    draining = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, draining.set)
    control = await child.Control.open(draining.set)
    metrics = GatewayMetrics(control)
    segment = Segment.create(f"tilewire-gateway-{settings.index}", settings.segment_bytes)
    if settings.huge_pages:
        nbytes = segment.take_huge_pages()
        logging.getLogger("tilewire.gateway").info("huge pages hold %d bytes of %d", nbytes, segment.nbytes)
    attached = asyncio.Event()

    def on_change(welcome: Welcome, is_up: bool) -> None:
        metrics.observe_engine(welcome, is_up)
        if all(client.welcome is not None for client in clients):
            attached.set()

    poller = Poller(settings.busy_poll_s)
    clients = [
        EngineClient(settings.index, address, segment, on_change, poller) for address in settings.engine_addresses
    ]
    gateway = make_gateway(settings, clients, Arena(segment), metrics)
    gateway.metrics.observe_load()
    context = None if settings.tls is None else make_context(settings.tls)
    servers = open_servers(gateway, context)

    background = [asyncio.create_task(client.run()) for client in clients]
    background.append(asyncio.create_task(drain_when_told(draining, gateway, servers, control)))
    background.append(asyncio.create_task(say_ready(attached, servers, control)))
    background.append(asyncio.create_task(gateway.authenticator.keep_current()))
    if context is not None and settings.tls is not None:
        background.append(asyncio.create_task(keep_certificate_current(context, settings.tls)))
    await asyncio.gather(*(server.serve(sockets=[door]) for server, door in servers.items()))
    metrics.flush()
    if gateway.recorder is not None:
        gateway.recorder.close()
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    await control.close()


def main() -> int:
    """Runs the process; returns its exit status."""
    # A terminal's Ctrl-C is the supervisor's to handle: it drains us first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = child.read_settings(GatewaySettings)
    log.configure(settings.log, process=f"gateway-{settings.index}")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(settings))
        except (KeysError, TlsError) as error:
            # Not `EXIT_CANNOT_START`: a file that went bad while the service runs must not end the gateways that run.
            logger.error("the gateway cannot start: %s", error)  # noqa: TRY400  (the reason is the whole story)
            return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
