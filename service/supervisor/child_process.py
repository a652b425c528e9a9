"""Runs one gateway or engine process over all its restarts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from tilewire.service.config.process import EngineSettings, GatewaySettings
from tilewire.service.ipc.link import Link
from tilewire.service.supervisor import child
from tilewire.service.telemetry.counters import Figures, MetricSet
from tilewire.service.telemetry.exposition import Exposition, Totals
from tilewire.service.telemetry.history import History

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 5.0
# A child that lived this long had a good start: the next restart is quick again.
GOOD_LIFE_S = 10.0
# Longest time to read the last messages of a child that is gone, which lie in its socket.
LAST_WORDS_S = 1.0
# A child that dies this often without ever having been ready will not get ready by itself.
MAX_UNREADY_DEATHS = 3

# `sysexits.h` calls it EX_OSERR: there was no process, for want of descriptors or memory.
EXIT_NOT_STARTED = 71

Logger = structlog.stdlib.BoundLogger
ChildSettings = GatewaySettings | EngineSettings


@dataclass(frozen=True)
class Spawned:
    """A process that waits for its settings.

    Attributes:
        control: Our end of its control link, blocking.
    """

    process: asyncio.subprocess.Process
    control: socket.socket


async def spawn(module: str, *arguments: str) -> Spawned:
    """Starts a process; it imports what it needs and waits for its settings.

    Raises:
        OSError: The system allows no more processes, threads or descriptors.
    """
    with contextlib.ExitStack() as unless_started:
        ours, theirs = socket.socketpair()
        unless_started.enter_context(ours)
        with theirs, _thread_errors():
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Never the folder that the command was typed in.
                "-P",
                # Where a crash within a library's code happened is written to the log.
                "-X",
                "faulthandler",
                "-m",
                module,
                *arguments,
                stdin=theirs.fileno(),
                start_new_session=True,
                cwd=folder_of_children(),
            )
        unless_started.pop_all()
    return Spawned(process, ours)


@contextlib.contextmanager
def _thread_errors() -> Iterator[None]:
    """Raises `OSError` where no thread can be started, as where no process can. Python 3.11 awaits each process in one."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error


def folder_of_children() -> str | None:
    """The folder that processes start in: ours, or the root where ours was deleted, as by an upgrade. MKL loads in none."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return os.sep
    return None


class Spare:
    """An engine process that has imported torch and waits: it takes the place of the next engine that dies."""

    def __init__(self, module: str, *arguments: str, is_wanted: bool = True) -> None:
        self._command = (module, *arguments)
        self._is_wanted = is_wanted
        self._spawning: asyncio.Task[Spawned] | None = None

    def prepare(self) -> None:
        """Starts one, unless there is one."""
        if self._is_wanted and self._spawning is None:
            self._spawning = asyncio.create_task(spawn(*self._command))

    async def take(self) -> Spawned:
        """Returns the spare process, or a new one."""
        spawning, self._spawning = self._spawning, None
        if spawning is not None:
            spawned = await spawning
            if spawned.process.returncode is None:
                return spawned
            spawned.control.close()
        return await spawn(*self._command)

    async def end(self) -> None:
        """Ends the spare process."""
        spawning, self._spawning, self._is_wanted = self._spawning, None, False
        if spawning is None:
            return
        with contextlib.suppress(OSError):
            spawned = await spawning
            spawned.control.close()
            with contextlib.suppress(ProcessLookupError):
                spawned.process.kill()
            await spawned.process.wait()


class Deaths:
    """Counts the processes that died: figures of the supervisor's own. One that never gets ready has none that could say so."""

    is_congested = False

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._metrics = MetricSet(self)
        self._deaths = self._metrics.counter(
            "tilewire_process_deaths_total",
            "Processes of the service that died, and were to be started again.",
            ("process",),
        )

    def send(self, figures: Figures) -> None:
        """`MetricSet`'s call."""
        self._totals.add("supervisor", figures)

    def count(self, name: str, number: int = 1) -> None:
        """Counts deaths of a process; 0 for one that is about to be started for the first time."""
        self._deaths.inc((name,), number)
        self._metrics.flush()


class Child:
    """One process of the service, over all its restarts.

    Args:
        name: For the log: `engine-0`, `gateway-1`.
        spare: Source of its processes.
        make: Factory of its settings for a number of restarts, and whether one of those before was ready; their
            descriptors are open in the block.
        totals: Gets its figures.
        deaths: Counts each of its deaths.
        exposition: Source of the text that it serves as `/metrics`.
        history: Source of the last minutes.
        logger: Gets its fate.
        silence_s: Longest time between two beats. After it the child is ended and replaced. 0 for a child that is not
            watched.

    Attributes:
        ready: Set while it does its work.
        detail: Text of its `Ready` message.
        failure: Why it is not started again; empty while it is.
    """

    def __init__(
        self,
        name: str,
        spare: Spare,
        make: Callable[[int, bool], AbstractContextManager[ChildSettings]],
        totals: Totals,
        deaths: Deaths,
        exposition: Exposition,
        history: History,
        logger: Logger,
        silence_s: float,
    ) -> None:
        self.name = name
        self._spare = spare
        self._make = make
        self._totals = totals
        self._deaths = deaths
        self._exposition = exposition
        self._history = history
        self._replies: set[asyncio.Task[None]] = set()
        self._logger = logger
        self._silence_s = silence_s
        self._beat_s = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._control: Link[child.ToSupervisor] | None = None
        self._draining = asyncio.Event()
        self._was_ready = False
        self.ready = asyncio.Event()
        self.detail = ""
        self.failure = ""

    async def run(self) -> int:
        """Runs it, again and again, until it is drained or cannot start. Returns its last exit status."""
        backoff_s, restarts = FIRST_BACKOFF_S, 0
        self._deaths.count(self.name, 0)
        status = 0
        while not self._draining.is_set():
            began_s = time.monotonic()
            status = await self._live(restarts)
            if self._draining.is_set():
                break
            self.failure = self._reason_to_give_up(status, restarts + 1)
            if self.failure:
                break
            lived_s = time.monotonic() - began_s
            backoff_s = FIRST_BACKOFF_S if lived_s > GOOD_LIFE_S else min(2 * backoff_s, LAST_BACKOFF_S)
            self._deaths.count(self.name)
            self._logger.error("a process died", name=self.name, status=status, restart_in_s=backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), backoff_s)
                # Nothing of it is left to be drained.
                status = 0
            restarts += 1
        return status

    def drain(self) -> None:
        """Sends `Drain`: the process finishes and exits."""
        self._draining.set()
        if self._control is not None:
            self._control.send(child.Drain())

    def kill(self) -> None:
        """Ends it at once."""
        self._draining.set()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _live(self, restarts: int) -> int:
        try:
            spawned = await self._spare.take()
        except OSError as error:
            self._logger.error("no process can be started", name=self.name, reason=str(error))  # noqa: TRY400  (nothing else)
            return EXIT_NOT_STARTED
        self._process, ours = spawned.process, spawned.control
        try:
            with self._make(restarts, self._was_ready) as settings, _thread_errors():
                # In a thread: it has to wait for a process that is only just importing.
                await asyncio.to_thread(child.send_settings, ours, settings)
        except OSError as error:
            # It ends when it reads that there are none.
            self._logger.error("a process got no settings", name=self.name, reason=str(error))  # noqa: TRY400  (nothing else)
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
        ours.setblocking(False)
        self._beat_s = 0.0
        lost = asyncio.Event()
        control: Link[child.ToSupervisor] = Link(child.ToSupervisor, self._on_message, lost.set)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: control, ours)
        self._control = control
        if self._draining.is_set():
            control.send(child.Drain())
        watching = asyncio.create_task(self._watch())
        status = await self._process.wait()
        watching.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(lost.wait(), LAST_WORDS_S)
        # Behind its last words, one of which may be that it is ready.
        self.ready.clear()
        control.close()
        self._totals.end(self.name)
        return status

    async def _watch(self) -> None:
        """Kills a child that sent beats and has fallen silent. The time of one that drains is bounded by who drains it."""
        while self._silence_s:
            slept_s = time.monotonic()
            await asyncio.sleep(child.BEAT_S)
            now_s = time.monotonic()
            if not self._beat_s or self._draining.is_set():
                continue
            if now_s - slept_s > 2 * child.BEAT_S:
                # It was the supervisor that did not run, and maybe the whole machine.
                self._beat_s = now_s
            elif now_s - self._beat_s > self._silence_s and self._process is not None:
                self._logger.error(
                    "a process hangs: it is ended", name=self.name, silent_s=round(now_s - self._beat_s, 1)
                )
                self._process.kill()
                return

    def _reason_to_give_up(self, status: int, deaths: int) -> str:
        if status == child.EXIT_CANNOT_START:
            return f"{self.name} cannot start; its reason is logged above"
        if not self._was_ready and deaths >= MAX_UNREADY_DEATHS:
            return (
                f"{self.name} died {deaths} times before it was ever ready, the last time with status {status}; "
                "what it said is above"
            )
        return ""

    def _on_message(self, message: child.ToSupervisor) -> None:
        match message:
            case Figures():
                self._totals.add(self.name, message)
            case child.Beat():
                self._beat_s = time.monotonic()
            case child.Read():
                task = asyncio.create_task(self._answer(message))
                self._replies.add(task)
                task.add_done_callback(self._replies.discard)
            case child.Ready(detail=detail):
                self.detail = detail
                self._was_ready = True
                self.ready.set()
                self._spare.prepare()
                self._logger.info("ready", name=self.name, detail=detail)

    async def _answer(self, request: child.Read) -> None:
        match request.what:
            case "hidden":
                content: object = self._totals.hidden(request.models)
            case "history":
                content = self._history.report(request.key)
            case form:
                content = await self._exposition.read(openmetrics=form == "openmetrics")
        if self._control is not None:
            self._control.send(child.Reply(request.id, msgspec.msgpack.encode(content)))
