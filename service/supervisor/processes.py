"""The parent of all processes: binds the port, starts engines and gateways, restarts what dies, drains in order.

Owns the listening sockets, the vault of resident tensors and the sums of all metrics. Runs one asyncio loop, without torch.
Its life as named phases:

    bind → start engines → start gateways → announce → watch → drain gateways → drain engines → exit
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import structlog

from tilewire.service.beside import run_beside
from tilewire.service.config.parsers import devices_of
from tilewire.service.config.process import EngineSettings, GatewaySettings, Inherited
from tilewire.service.config.settings import Settings
from tilewire.service.gateway.auth.quotas import page_bytes
from tilewire.service.ipc.arena import make_sealed
from tilewire.service.ipc.board import create_board
from tilewire.service.ipc.connection_counts import ConnectionCounts, create_counts
from tilewire.service.supervisor.child_process import Child, Deaths, Spare
from tilewire.service.supervisor.files import open_files
from tilewire.service.supervisor.listeners import StartError, address_of, bind, bind_first, listen_locally, reserve
from tilewire.service.supervisor.vault import VaultFeed, VaultReader
from tilewire.service.telemetry.exposition import Exposition, Totals
from tilewire.service.telemetry.history import History

# On top of the drain time-out, for the children's own last steps.
EXIT_GRACE_S = 5.0
# Files that the largest process has open before anything is asked for, and more of each other process.
OWN_FILES, FILES_OF_CHILD = 32, 4
# An engine lets go of arenas that a driver has pinned. Of two engines with 34 GiB each, one had not within 5.7 s.
UNPINNED_BYTES_PER_S = 4 * 2**30

Logger = structlog.stdlib.BoundLogger


class Supervisor:
    """Runs the whole service.

    When requests are served it calls `announce`, once, with the address and what each engine computes with.
    """

    def __init__(self, settings: Settings, logger: Logger, announce: Callable[[str, list[str]], None]) -> None:
        self._settings = settings
        self._logger = logger
        self._announce = announce
        self._num_engines = len(devices_of(settings.device))
        self._vault = VaultReader(self._num_engines)
        self._engines: list[Child] = []
        self._gateways: list[Child] = []

    async def run(self) -> int:
        """Serves until SIGTERM, SIGINT or SIGHUP.

        Returns:
            The exit status: 0 when every accepted request was answered within the drain time-out.

        Raises:
            StartError: Too few files may be open or too small ones, the port is taken, a file cannot be opened, or an engine
                cannot start.
        """
        _raise_file_limit()
        self._check_file_limits()
        self._board = create_board()
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, stopping)
        # The terminal is closed. It may come several times, and those who start a service by nohup want none.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, stopping.set)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(await bind_first(self._settings.host, self._settings.port, self._logger))
            self._files = open_files(self._settings, stack)
            self._start_children(listener, await self._reserve_grpc(stack), stack)
            engines = [asyncio.create_task(engine.run()) for engine in self._engines]
            gateways = [asyncio.create_task(gateway.run()) for gateway in self._gateways]
            background = self._announce_when_ready(listener), self._history.keep()
            try:
                await run_beside(self._watch(stopping, [*engines, *gateways]), background)
            finally:
                await self._spare.end()
            listener.close()
            return await self._drain(engines, gateways)

    def _check_file_limits(self) -> None:
        settings, limit = self._settings, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if resource.RLIM_INFINITY != size < settings.segment_bytes:
            raise StartError(
                f"a file may have {size} bytes, and the memory that a gateway shares counts as one of"
                f" {settings.segment_bytes}: raise the limit (ulimit -f), or lower --arena-bytes"
            )
        needed = OWN_FILES + FILES_OF_CHILD * (self._num_engines + settings.num_arenas)
        if limit < needed:
            raise StartError(
                f"{limit} files may be open, and {needed} are needed at least: raise the limit (ulimit -n)"
            )
        if settings.num_connections < settings.max_connections:
            self._logger.warning(
                "the limit of open files allows fewer connections than --max-connections",
                connections=settings.num_connections,
                max_connections=settings.max_connections,
                remedy="raise the limit (ulimit -n)",
            )

    def _on_signal(self, stopping: asyncio.Event) -> None:
        if stopping.is_set():
            self._logger.warning("told to stop twice: stopping at once")
            for process in (*self._gateways, *self._engines):
                process.kill()
        stopping.set()

    def _start_children(self, listener: socket.socket, grpc_address: str | None, stack: contextlib.ExitStack) -> None:
        totals = Totals()
        self._history = history = History(totals)
        child = functools.partial(
            Child,
            totals=totals,
            deaths=Deaths(totals),
            exposition=Exposition(totals),
            history=history,
            logger=self._logger,
            silence_s=self._settings.engine_timeout_s,
        )
        addresses = []
        devices = devices_of(self._settings.device)
        # Which of the devices it will be for does not matter to what it imports.
        self._spare = Spare("tilewire.service.engine", devices[0], is_wanted=self._settings.spare_engine)
        for index in range(len(devices)):
            door = stack.enter_context(listen_locally())
            addresses.append(door.getsockname().decode())
            make = self._engine_settings(index, door, stack)
            self._engines.append(child(f"engine-{index}", self._spare, make))
        inherited = self._open_for_gateways(listener, stack)
        for index in range(self._settings.num_arenas):
            is_http = index < self._settings.num_gateways
            settings = self._settings.gateway(index, inherited[index], addresses, None if is_http else grpc_address)
            spare = Spare("tilewire.service.gateway" + ("" if is_http else ".grpc"), is_wanted=False)
            self._gateways.append(child(settings.name, spare, _gateway_settings(settings)))

    async def _reserve_grpc(self, stack: contextlib.ExitStack) -> str | None:
        """Binds the port of gRPC, whose library takes no socket: the gateway binds it again, now and at each restart."""
        settings = self._settings
        if settings.grpc_port is None:
            return None
        door = await bind_first(settings.host, settings.grpc_port, self._logger, reserve)
        address = address_of(stack.enter_context(door))
        self._logger.info("gRPC is served", address=address)
        return address

    def _open_for_gateways(self, listener: socket.socket, stack: contextlib.ExitStack) -> list[Inherited]:
        """Opens what each gateway inherits: a listening socket, and pages that count connections and API keys' usage."""
        settings = self._settings
        metrics_fd = usage_fd = -1
        if settings.metrics_port is not None:
            door = stack.enter_context(bind(settings.metrics_host, settings.metrics_port))
            metrics_fd = door.fileno()
            self._logger.info("metrics are served apart", url=f"http://{address_of(door)}/metrics")
        if settings.api_keys_file is not None:
            usage_fd = make_sealed("tilewire-usage", page_bytes(settings.num_arenas))
            stack.callback(os.close, usage_fd)
        counts_fd = create_counts(settings.num_gateways)
        stack.callback(os.close, counts_fd)
        of_http = Inherited(listener.fileno(), metrics_fd, usage_fd, self._board, counts_fd)
        return [*[of_http] * settings.num_gateways, Inherited(usage=usage_fd, board=self._board)]

    def _engine_settings(
        self, index: int, door: socket.socket, stack: contextlib.ExitStack
    ) -> Callable[[int, bool], AbstractContextManager[EngineSettings]]:
        """Opens an engine's socket to the vault; returns the factory of its settings, for `Child`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        stack.enter_context(theirs)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._vault.drain, ours, index)
        stack.callback(loop.remove_reader, ours)
        feed = VaultFeed(ours, self._vault.kept)
        if self._num_engines > 1:
            self._vault.feeds[index] = feed
            stack.callback(feed.clear)

        @contextlib.contextmanager
        def make(restarts: int, was_ready: bool) -> Iterator[EngineSettings]:
            self._vault.drain(ours, index)
            feed.clear()
            with self._vault.handover(index) as kept:
                fds = (door.fileno(), theirs.fileno(), self._board)
                yield self._settings.engine(index, *fds, restarts, was_ready, kept, self._files)

        return make

    async def _announce_when_ready(self, listener: socket.socket) -> None:
        for process in (*self._engines, *self._gateways):
            await process.ready.wait()
        # Behind TLS the gateways' own word has to do: the supervisor may have no certificate to show.
        if self._settings.tls is None:
            await _until_ready(*listener.getsockname()[:2])
        scheme = "http" if self._settings.tls is None else "https"
        self._announce(f"{scheme}://{address_of(listener)}", [engine.detail for engine in self._engines])

    async def _watch(self, stopping: asyncio.Event, children: list[asyncio.Task[int]]) -> None:
        """Returns on a signal.

        Raises:
            StartError: A child cannot start, or died too often before it was ever ready.
        """
        signalled = asyncio.create_task(stopping.wait())
        await asyncio.wait([signalled, *children], return_when=asyncio.FIRST_COMPLETED)
        if not signalled.done():
            signalled.cancel()
            for process in (*self._gateways, *self._engines):
                process.kill()
            await asyncio.gather(*children)
            reasons = [process.failure for process in (*self._engines, *self._gateways) if process.failure]
            raise StartError("; ".join(reasons))

    async def _drain(self, engines: list[asyncio.Task[int]], gateways: list[asyncio.Task[int]]) -> int:
        """Gateways first: they stop admitting and finish what is under way, for which they need the engines."""
        self._logger.info("draining", timeout_s=self._settings.drain_timeout_s)
        unpin_s = self._num_engines * self._settings.num_arena_bytes / UNPINNED_BYTES_PER_S
        statuses = await self._end(self._gateways, gateways, self._settings.drain_timeout_s + EXIT_GRACE_S)
        statuses += await self._end(self._engines, engines, EXIT_GRACE_S + unpin_s)
        is_clean = not any(statuses)
        self._logger.info("stopped", clean=is_clean)
        return 0 if is_clean else 1

    async def _end(self, children: list[Child], tasks: list[asyncio.Task[int]], timeout_s: float) -> list[int]:
        for process in children:
            process.drain()
        await asyncio.wait(tasks, timeout=timeout_s)
        for process, task in zip(children, tasks, strict=True):
            if not task.done():
                self._logger.error(
                    "a process does not end: it is killed", name=process.name, timeout_s=round(timeout_s, 1)
                )
                process.kill()
        return list(await asyncio.gather(*tasks))


def _gateway_settings(settings: GatewaySettings) -> Callable[[int, bool], AbstractContextManager[GatewaySettings]]:
    """Returns the factory of a gateway's settings, for `Child`."""

    def make(_restarts: int, _was_ready: bool) -> AbstractContextManager[GatewaySettings]:
        if settings.inherited.connections >= 0:
            ConnectionCounts(settings.inherited.connections, settings.index).clear()
        return contextlib.nullcontext(settings)

    return make


async def _until_ready(host: str, port: int) -> None:
    """Polls as a client would, until the answer is 200."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (read, not bound)
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(target, port)
            writer.write(b"GET /readyz HTTP/1.1\r\nhost: tilewire\r\nconnection: close\r\n\r\n")
            status_line = await reader.readline()
            writer.close()
            if b" 200 " in status_line:
                return
        await asyncio.sleep(0.02)


def _raise_file_limit() -> None:
    """Connections and kept tensors each hold a descriptor: take as many as we may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
