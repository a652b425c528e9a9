"""Engines of our own behind a gateway's router, which answer when a test says so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from tests.support.jobs import SentJob
from tilewire.service.errors import (
    ClientGone,
    TilewireError,
    Unavailable,
)
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.client import NOT_RESIDING, Reply
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.ipc.arena import Arena, Lease, Segment
from tilewire.service.ipc.board import VersionBoard, home_of
from tilewire.service.ipc.messages import (
    Command,
    Done,
    InputSpec,
    OutputSpec,
    Refused,
    Residing,
    Stale,
    Template,
    TensorInfo,
    Warming,
    Welcome,
)
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import Placement

KIND = TensorType("float32", (2,))
JOB = (Template(1, "add", (), AddOptions(), (OutputSpec(KIND),), 1, 1), (0,))


class ScriptedEngine:
    """Answers when a test says so.

    Attributes:
        sent: What it was sent that is no job.
        jobs: Jobs that it was sent.
        futures: Answers, in the order of the requests.
        is_hung: It says nothing of what is cancelled.
        has_started: Its jobs have started, and run on when they are cancelled.
    """

    def __init__(
        self, index: int, *, is_ready: bool = True, quota: int = 0, is_hung: bool = False, has_started: bool = False
    ) -> None:
        self.is_hung, self.has_started = is_hung, has_started
        self.residing = NOT_RESIDING
        self.welcome = Welcome(index, "cpu", "cpu", "", "", "", quota) if is_ready else None
        self.warming: Warming | Refused | None = None
        self.sent: list[Command] = []
        self.jobs: list[SentJob] = []
        self.futures: list[asyncio.Future[Reply]] = []
        self.cancelled: list[int] = []

    @property
    def outstanding(self) -> int:
        return sum(not future.done() for future in self.futures)

    def send(self, request: Command) -> tuple[int, asyncio.Future[Reply]]:
        if self.welcome is None:
            raise Unavailable("the engine is starting or restarting")
        self.sent.append(request)
        self.futures.append(asyncio.get_running_loop().create_future())
        return len(self.futures) - 1, self.futures[-1]

    def submit(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> tuple[int, asyncio.Future[Reply]]:
        self.jobs.append(SentJob(template, offsets, caller.deadline_ns, caller.priority))
        self.futures.append(asyncio.get_running_loop().create_future())
        return len(self.futures) - 1, self.futures[-1]

    def cancel(self, request_id: int, *, is_late: bool = False) -> asyncio.Future[None]:
        self.cancelled.append(request_id)
        known = asyncio.get_running_loop().create_future()
        if not self.is_hung:
            known.set_result(None)
            if not self.has_started and not self.futures[request_id].done():
                self.futures[request_id].set_exception(ClientGone("cancelled"))
        return known


class Stays:
    """A client that waits for its answer."""

    is_disconnected = False

    def watch(self, on_gone: Callable[[], object]) -> None:
        self.on_gone = on_gone

    def unwatch(self) -> None:
        del self.on_gone


class Held:
    """Slots of a request."""

    def __init__(self) -> None:
        self.arena = Arena(Segment.create("test-router", 2**16))

    def hold_until(self, answered: asyncio.Future[Reply]) -> None:
        self.answered = answered

    async def wait(self, nbytes: int) -> Lease:
        return self.arena.lease(nbytes)

    def give_back(self, lease: Lease) -> None:
        lease.release()


class Leaves(Stays):
    """A client that is gone before its answer."""

    def watch(self, on_gone: Callable[[], object]) -> None:
        super().watch(on_gone)
        self.is_disconnected = True
        on_gone()


def homed(prefix: str, home: int, count: int = 2) -> str:
    """A name whose changes engine `home` of `count` orders."""
    return next(name for name in (f"{prefix}{n}" for n in itertools.count()) if home_of(name, count) == home)


# The first engine is its home whether there are two or three.
W = next(name for name in (f"w{n}" for n in itertools.count()) if home_of(name, 2) == home_of(name, 3) == 0)


def info(version: int, *engines: int, kind: TensorType = KIND, placement: Placement = "replicate") -> TensorInfo:
    return TensorInfo(W, kind, 1.0, version=version, placement=placement, engines=engines)


def job_of(*names: str) -> tuple[Template, tuple[int, ...]]:
    inputs = tuple(InputSpec(field, KIND, name) for field, name in zip("ab", names, strict=False))
    return Template(1, "add", inputs, AddOptions(), (OutputSpec(KIND),), 1, 1), (0,)


class Scene:
    """Engines behind a router and a board. The first is the home of `W`.

    Args:
        followed: Version up to which each engine has followed the first.
    """

    def __init__(self, *followed: int, quota: int = 10**6) -> None:
        self.engines = [ScriptedEngine(index, quota=quota) for index in range(len(followed))]
        for engine, version in zip(self.engines, followed, strict=True):
            engine.residing = Residing((version,) * len(followed))
        self.board = VersionBoard()
        self.router = Engines(self.engines, self.board)

    def compute(self, *names: str) -> asyncio.Future[Done | Stale]:
        return asyncio.ensure_future(self.router.compute(*job_of(*names), Caller(Stays(), Held())))


async def answer(engine: ScriptedEngine, reply: Reply | TilewireError) -> Command | None:
    """Answers the oldest open request of an engine; returns what was sent last that is no job."""
    await settle()
    future = next(one for one in engine.futures if not one.done())
    if isinstance(reply, TilewireError):
        future.set_exception(reply)
    else:
        future.set_result(reply)
    await settle()
    return engine.sent[-1] if engine.sent else None


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)
