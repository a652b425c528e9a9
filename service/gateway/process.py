"""The life of a gateway process, whatever it speaks. Owns its named phases.

settings → arena → engine links → listen → serve → drain → exit
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import uvloop

from tilewire._version import __version__
from tilewire.service.beside import run_beside
from tilewire.service.config.process import GatewaySettings, TracingSettings
from tilewire.service.gateway.auth.authenticator import Authenticator
from tilewire.service.gateway.auth.quotas import Quotas, UsagePage
from tilewire.service.gateway.connection.limits import DRAIN_GRACE_S
from tilewire.service.gateway.engines.busy_poll import BusyPoller
from tilewire.service.gateway.engines.client import EngineClient
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.gateway.request.room import Room
from tilewire.service.gateway.telemetry.metrics import GatewayMetrics
from tilewire.service.ipc.arena import Arena, Segment
from tilewire.service.ipc.board import VersionBoard
from tilewire.service.ipc.messages import Welcome
from tilewire.service.supervisor import child
from tilewire.service.supervisor.listeners import PortTaken
from tilewire.service.telemetry import log
from tilewire.service.watched_files import UnusableFile

if TYPE_CHECKING:
    from tilewire.service.gateway.telemetry.otlp import OtlpRecorder

logger = logging.getLogger(__name__)

EXIT_FAILED = 1

# How long requests may take to end when the supervisor is gone.
ORPHANS_DRAIN_S = 1.0
# A thread that reads or writes long text gives the interpreter's lock up to the event loop after this, instead of 5 ms.
SWITCH_S = 0.0005


class Server(Protocol):
    """A server on one port.

    Attributes:
        is_listening: Set when it takes connections.
    """

    is_listening: asyncio.Event

    async def serve(self) -> None:
        """Serves until it is closed and its connections have ended."""
        ...

    def observe_readiness(self) -> None:
        """Takes note that engines came or went, or that the gateway drains."""
        ...

    def close(self) -> None:
        """Takes no more connections, and ends those that are there once they are idle."""
        ...

    def abort(self) -> None:
        """Ends all connections."""
        ...


def make_authenticator(settings: GatewaySettings, metrics: GatewayMetrics) -> Authenticator:
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
        report=metrics.follow_file("api_keys"),
    )


def open_recorder(tracing: TracingSettings, index: int) -> OtlpRecorder | None:
    """Returns the recorder of spans; None when its packages are missing, which the supervisor has reported."""
    try:
        # Imported here and not above: the packages are an extra, and cost every gateway's start.
        from tilewire.service.gateway.telemetry.otlp import OtlpRecorder  # noqa: PLC0415
    except ModuleNotFoundError:
        return None
    return OtlpRecorder(tracing, __version__, index)


async def drain_on_signal(
    draining: asyncio.Event, gateway: Gateway, servers: Sequence[Server], control: child.Control
) -> None:
    """Stops admitting, waits for what is under way, keeps answering 503 for a moment, then closes the door.

    Without a supervisor it closes the port first, and waits for a moment only. Another service may need the port, and
    the engines go as well.
    """
    await draining.wait()
    gateway.admission.is_draining = True
    for server in servers:
        server.observe_readiness()
    if control.is_lost:
        for server in servers:
            server.close()
        await asyncio.sleep(ORPHANS_DRAIN_S)
        for server in servers:
            server.abort()
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(gateway.settings.drain_timeout_s):
            await gateway.admission.drain()
    await asyncio.sleep(DRAIN_GRACE_S)
    for server in servers:
        server.close()


class ArenaRefused(Exception):
    """An engine cannot map the arena of a gateway that was never attached."""


class Attachment:
    """Whether every engine has had this gateway's arena.

    Attributes:
        done: Ends when all have it, or fails with `ArenaRefused` when one cannot map it before.
    """

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Takes note that all engines have it."""
        if not self.done.done():
            self.done.set_result(None)

    def refuse(self, reason: str) -> None:
        """Takes note that an engine refuses it. A gateway that has served goes on: other engines may have its arena."""
        if self.done.done():
            logger.warning("an engine refuses this gateway: %s", reason)
        else:
            self.done.set_exception(ArenaRefused(reason))


async def say_ready(attachment: Attachment, servers: Sequence[Server], control: child.Control) -> None:
    """Sends `Ready` to the supervisor, once this gateway listens and every engine has its arena.

    Raises:
        ArenaRefused: An engine cannot map it.
    """
    await attachment.done
    for server in servers:
        await server.is_listening.wait()
    child.freeze_objects()
    sys.setswitchinterval(SWITCH_S)
    control.send(child.Ready("every engine is attached"))


async def serve(
    settings: GatewaySettings, open_servers: Callable[[Gateway], Sequence[Server]], gather_turns: int
) -> None:
    """Runs the gateway until it is drained."""
    draining = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, draining.set)
    control = await child.Control.open(draining.set)
    metrics = GatewayMetrics(control)
    segment = Segment.create(f"tilewire-gateway-{settings.index}", settings.segment_bytes)
    if settings.huge_pages:
        nbytes = segment.take_huge_pages()
        logging.getLogger("tilewire.gateway").info("huge pages hold %d bytes of %d", nbytes, segment.nbytes)
    attachment = Attachment()
    servers: Sequence[Server] = ()

    def on_change(welcome: Welcome, is_up: bool) -> None:
        metrics.observe_engine(welcome, is_up)
        for server in servers:
            server.observe_readiness()
        if all(client.welcome is not None for client in clients):
            attachment.end()

    poller = BusyPoller(settings.busy_poll_s)
    clients = [
        EngineClient(settings.index, address, segment, on_change, poller, gather_turns, attachment.refuse)
        for address in settings.engine_addresses
    ]
    arena = Arena(segment)
    gateway = Gateway(
        settings=settings,
        version=__version__,
        engines=Engines(clients, VersionBoard(settings.inherited.board)),
        arena=arena,
        admission=Admission(Room(arena, settings.room_timeout_s), settings.max_in_flight, settings.max_body_bytes),
        metrics=metrics,
        authenticator=make_authenticator(settings, metrics),
        recorder=None if settings.tracing is None else open_recorder(settings.tracing, settings.index),
    )
    metrics.observe_load()
    servers = open_servers(gateway)

    async def serve_all() -> None:
        await asyncio.gather(*(server.serve() for server in servers))
        metrics.flush()
        if gateway.recorder is not None:
            gateway.recorder.close()

    background: list[Coroutine[Any, Any, None]] = [client.run() for client in clients]
    background.append(drain_on_signal(draining, gateway, servers, control))
    background.append(say_ready(attachment, servers, control))
    background.append(gateway.authenticator.keep_current())
    background.append(control.beat())
    await run_beside(serve_all(), background)
    await control.close()


def run(open_servers: Callable[[Gateway], Sequence[Server]], gather_turns: int = 0) -> int:
    """Runs the process; returns its exit status."""
    # A terminal's Ctrl-C is the supervisor's to handle: it drains us first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = child.read_settings(GatewaySettings)
    log.configure(settings.log, process=settings.name)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(settings, open_servers, gather_turns))
        except UnusableFile as error:
            # Not `EXIT_CANNOT_START`: a file that went bad while the service runs must not end the gateways that run.
            logger.error("the gateway cannot start: %s", error)  # noqa: TRY400  (the reason is the whole story)
            return EXIT_FAILED
        except ArenaRefused as error:
            # Not `EXIT_CANNOT_START`: an engine that has memory later must not find the service ended.
            logger.error("the gateway cannot start: an engine refuses it: %s", error)  # noqa: TRY400  (the reason is the whole story)
            return EXIT_FAILED
        except PortTaken as error:
            # Only at the start: a socket that listens once does so for as long as the supervisor has it.
            logger.error("the gateway cannot start: %s", error)  # noqa: TRY400  (the reason is the whole story)
            return child.EXIT_CANNOT_START
        except Exception:
            logger.exception("the gateway cannot go on")
            return EXIT_FAILED
    return 0
