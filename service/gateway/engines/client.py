"""The gateway's end of the Unix socket to one engine: connects, says hello, matches answers to requests, reconnects.

Owns request ids and pending answers. Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from tilewire.service.errors import Unavailable
from tilewire.service.gateway.engines.busy_poll import BusyPoller
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.engine_process import EngineProcess
from tilewire.service.gateway.engines.templates import KeptTemplates
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.link import Link, send_hello
from tilewire.service.ipc.messages import (
    Cancel,
    Command,
    Done,
    Failed,
    ForgetTemplate,
    Hello,
    Job,
    Kernels,
    Refused,
    RegionList,
    Residing,
    Stale,
    Started,
    Template,
    Tensors,
    ToGateway,
    Warming,
    Welcome,
)
from tilewire.service.telemetry import log

logger = logging.getLogger(__name__)

RECONNECT_S = 0.1
# An engine that cannot map the arena may be able to when it is another process, or has freed memory.
REFUSED_S = 5.0
# With no more jobs under way each is sent at once: a lone client waits for nobody.
MAX_AT_ONCE = 2
# Of an engine that has not said anything.
NOT_RESIDING = Residing(())

Reply = Done | Stale | Tensors | RegionList | Kernels


class Engine(Protocol):
    """Interface of an engine in a gateway; a test may put its own here.

    Attributes:
        welcome: Identity of the engine while it is ready, else None.
        warming: Progress of the engine while it warms up, or why it refuses this gateway, else None.
        residing: How far it has followed the other engines' changes of residents, as it said last.
        outstanding: Requests that it has not answered.
    """

    @property
    def welcome(self) -> Welcome | None: ...
    @property
    def warming(self) -> Warming | Refused | None: ...
    @property
    def residing(self) -> Residing: ...
    @property
    def outstanding(self) -> int: ...

    def send(self, request: Command) -> tuple[int, asyncio.Future[Reply]]:
        """Sends a request under a fresh id; the future holds the reply, or raises an error of the tree.

        Raises:
            Unavailable: The engine is not ready.
        """
        ...

    def submit(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> tuple[int, asyncio.Future[Reply]]:
        """Sends a job under a fresh id, and before it the template, unless the engine has it.

        Returns:
            The job's id, and a future that holds the reply or raises an error of the tree.

        Raises:
            Unavailable: The engine is not ready.
        """
        ...

    def cancel(self, request_id: int, *, is_late: bool = False) -> asyncio.Future[None]:
        """Cancels a job that has not started. Its own future still ends.

        Args:
            request_id: Number of the job.
            is_late: Whether its deadline is the reason; else its client left.

        Returns:
            A future that ends when the engine says that the job has started, or with the job.
        """
        ...


class EngineClient:
    """A connection to one engine that lasts as long as the gateway; see `Engine` for the calls.

    Args:
        index: Index of this gateway.
        address: Abstract address of the engine's socket; begins with NUL.
        segment: This gateway's arena.
        on_change: Called when the engine becomes ready, with its welcome, or is lost, with None.
        poller: Receiver of the number of requests under way.
        gather_turns: Turns of the loop that a job may wait for others, while some are under way.
        on_refused: Called with the reason when the engine begins to refuse this gateway.
    """

    def __init__(
        self,
        index: int,
        address: str,
        segment: Segment,
        on_change: Callable[[Welcome, bool], None] | None = None,
        poller: BusyPoller | None = None,
        gather_turns: int = 0,
        on_refused: Callable[[str], object] | None = None,
    ) -> None:
        self._index = index
        self._address = address
        self._segment = segment
        self._on_change = on_change
        self._poller = poller or BusyPoller(0)
        self._gather_turns = gather_turns
        self._on_refused = on_refused
        self._link: Link[ToGateway] | None = None
        # Held: the running loop is looked up with a system call.
        self._loop = asyncio.get_running_loop()
        self._lost = asyncio.Event()
        self._process = EngineProcess(0)
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        # Of those that are cancelled: ends when it is known whether they have started.
        self._cancelled: dict[int, asyncio.Future[None]] = {}
        # Those that the engine has, by number. A request may use one for longer than the gateway finds it by value.
        self._templates: KeptTemplates[int] = KeptTemplates()
        self.welcome: Welcome | None = None
        self.warming: Warming | Refused | None = None
        self.residing = NOT_RESIDING

    @property
    def outstanding(self) -> int:
        return len(self._pending)

    def send(self, request: Command) -> tuple[int, asyncio.Future[Reply]]:
        link = self._ready_link()
        request_id, future = self._expect_reply()
        message = msgspec.structs.replace(request, id=request_id, request_id=log.request_id.get())
        self._post(link, request_id, message)
        return request_id, future

    def submit(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> tuple[int, asyncio.Future[Reply]]:
        link = self._ready_link()
        request_id, future = self._expect_reply()
        if self._templates.use(template.id) is None:
            if not self._post(link, request_id, template):
                return request_id, future
            for dropped in self._templates.add(template.id, template):
                link.send(ForgetTemplate(dropped.id))
        _client, _slots, deadline_ns, priority, flow = caller
        job = Job(request_id, template.id, offsets, deadline_ns, priority, log.request_id.get(), *flow)
        self._post(link, request_id, job, self._gather_turns if len(self._pending) > MAX_AT_ONCE else 0)
        return request_id, future

    def _ready_link(self) -> Link[ToGateway]:
        if self.welcome is None or self._link is None:
            raise Unavailable("the engine is starting or restarting")
        return self._link

    def _expect_reply(self) -> tuple[int, asyncio.Future[Reply]]:
        request_id = next(self._ids)
        future = self._pending[request_id] = self._loop.create_future()
        self._poller.sent()
        return request_id, future

    def _post(self, link: Link[ToGateway], request_id: int, message: msgspec.Struct, turns: int = 0) -> bool:
        """Sends a message of a request. One that cannot be encoded ends its request; returns whether it could."""
        try:
            link.send(message, turns)
        except Exception:
            logger.exception("a message to an engine cannot be encoded")
            self._on_message(Failed(request_id, "internal", "internal error"))
            return False
        return True

    def cancel(self, request_id: int, *, is_late: bool = False) -> asyncio.Future[None]:
        known = self._cancelled.get(request_id) or self._loop.create_future()
        if self._link is None or request_id not in self._pending:
            known.set_result(None)
        elif request_id not in self._cancelled:
            self._cancelled[request_id] = known
            self._link.send(Cancel(request_id, is_late))
        return known

    async def run(self) -> None:
        """Keeps the connection up until cancelled."""
        try:
            while True:
                try:
                    await self._connect()
                    await self._lost.wait()
                except OSError as error:
                    logger.debug("engine at %r: %s", self._address, error)
                await asyncio.sleep(REFUSED_S if isinstance(self.warming, Refused) else RECONNECT_S)
        finally:
            if self._link is not None:
                self._link.close()

    async def _connect(self) -> None:
        loop = self._loop
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, self._address)
            send_hello(sock, Hello(self._index, self._segment.nbytes), self._segment.fd)
        except BaseException:
            sock.close()
            raise
        self._lost.clear()
        link: Link[ToGateway] = Link(ToGateway, self._on_message, self._on_lost)
        await loop.connect_accepted_socket(lambda: link, sock)
        self._link = link

    def _on_message(self, message: ToGateway) -> None:
        if isinstance(message, Warming):
            self.warming = message
            return
        if isinstance(message, Refused):
            self._take_refusal(message)
            return
        if isinstance(message, Residing):
            self.residing = message
            return
        if isinstance(message, Welcome):
            self._process = EngineProcess(message.pid)
            self.welcome, self.warming, self.residing = message, None, message.residing
            if self._on_change is not None:
                self._on_change(message, True)
            return
        if self._cancelled and (known := self._cancelled.pop(message.id, None)) is not None:
            known.set_result(None)
        if isinstance(message, Started):
            return
        future = self._pending.pop(message.id)
        self._poller.answered()
        if future.cancelled():
            return
        if isinstance(message, Failed):
            future.set_exception(message.error())
        else:
            future.set_result(message)

    def _take_refusal(self, refused: Refused) -> None:
        was_refused, self.warming = isinstance(self.warming, Refused), refused
        if self._on_refused is not None and not was_refused:
            self._on_refused(refused.reason)

    def _on_lost(self) -> None:
        welcome, self.welcome, self._link = self.welcome, None, None
        if not isinstance(self.warming, Refused):
            self.warming = None
        self.residing = NOT_RESIDING
        pending, self._pending = self._pending, {}
        self._templates.clear()
        cancelled, self._cancelled = self._cancelled, {}
        for known in cancelled.values():
            known.set_result(None)
        self._poller.answered(len(pending))
        process, self._process = self._process, EngineProcess(0)
        if pending:
            process.on_ended(partial(_fail, list(pending.values())))
        else:
            process.close()
        if welcome is not None and self._on_change is not None:
            self._on_change(welcome, False)
        self._lost.set()


def _fail(pending: Sequence[asyncio.Future[Reply]]) -> None:
    """Ends what a lost engine had."""
    for future in pending:
        if not future.cancelled():
            future.set_exception(Unavailable("the engine restarted while it had this request"))


def state_of(engine: Engine) -> dict[str, object]:
    """Describes an engine: ready, warming up and how far, refusing this gateway and why, or starting."""
    if engine.welcome is not None:
        return {"device": engine.welcome.device, "state": "ready"}
    if isinstance(engine.warming, Refused):
        return {"device": None, "state": "refusing", "reason": engine.warming.reason}
    if engine.warming is not None:
        return {**msgspec.structs.asdict(engine.warming), "state": "warming"}
    return {"device": None, "state": "starting"}
