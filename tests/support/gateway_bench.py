"""A gateway's own server on a free port in this process, with an engine of ours at the Protocol, which answers on demand.

Owns the engine and the life of the server; knows no test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np

from tests.support.jobs import SentJob
from tests.support.local_totals import LocalTotals
from tests.support.tensor_bodies import NUMPY, Array
from tilewire.service.config.process import Inherited
from tilewire.service.config.settings import Settings
from tilewire.service.errors import UnknownName
from tilewire.service.gateway.__main__ import GatewayServer
from tilewire.service.gateway.app import create_app
from tilewire.service.gateway.auth.authenticator import Authenticator
from tilewire.service.gateway.engines.caller import Caller
from tilewire.service.gateway.engines.client import NOT_RESIDING, Reply
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.gateway.request.room import Room
from tilewire.service.gateway.telemetry.metrics import GatewayMetrics
from tilewire.service.ipc.arena import Arena, Segment
from tilewire.service.ipc.messages import (
    Command,
    DescribeTensor,
    Done,
    Stale,
    Template,
    TensorInfo,
    Tensors,
    Timings,
    Warming,
    Welcome,
)
from tilewire.service.ops.op import TensorType

SEGMENT_BYTES = 2**23


class SummingEngine:
    """Knows one op, `add`, and the residents that a test puts here.

    Attributes:
        residents: By name.
        jobs: All that came.
        cancelled: Ids of those that were cancelled.
        is_held: Jobs wait until `answer_all`.
        error: What jobs are answered, instead of their sums.
        bug: What `send` raises.
        descriptions: Answers of the next descriptions, before those of `residents`.
    """

    def __init__(self, arena: Arena) -> None:
        self.residing = NOT_RESIDING
        self.welcome: Welcome | None = Welcome(0, "cpu", "cpu", "", "", "")
        self.warming: Warming | None = None
        self.outstanding = 0
        self.residents: dict[str, Array] = {}
        self.jobs: list[SentJob] = []
        self.cancelled: list[int] = []
        self.is_held = False
        self.error: Exception | None = None
        self.bug: Exception | None = None
        self.descriptions: list[Reply | Exception] = []
        self._arena = arena
        self._ids = itertools.count(1)
        self._held: list[tuple[SentJob, asyncio.Future[Reply]]] = []

    def send(self, request: Command) -> tuple[int, asyncio.Future[Reply]]:
        """See `Engine.send`."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        number = next(self._ids)
        if self.bug is not None:
            raise self.bug
        assert isinstance(request, DescribeTensor)
        if self.descriptions:
            reply = self.descriptions.pop(0)
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)
        elif request.name in self.residents:
            future.set_result(Tensors(number, (self._info(request.name),)))
        else:
            future.set_exception(UnknownName(f"name: no resident tensor {request.name!r}"))
        return number, future

    def submit(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> tuple[int, asyncio.Future[Reply]]:
        """See `Engine.submit`."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self.bug is not None:
            raise self.bug
        job = SentJob(template, offsets, caller.deadline_ns, caller.priority)
        self.jobs.append(job)
        self._held.append((job, future))
        if not self.is_held:
            self.answer_all()
        return next(self._ids), future

    def cancel(self, request_id: int, *, is_late: bool = False) -> asyncio.Future[None]:
        """See `Engine.cancel`."""
        self.cancelled.append(request_id)
        return asyncio.get_running_loop().create_future()

    def answer_all(self) -> None:
        """Answers every job that waits."""
        held, self._held = self._held, []
        for job, future in held:
            if self.error is not None:
                future.set_exception(self.error)
            else:
                future.set_result(self._compute(job))

    def _compute(self, job: SentJob) -> Reply:
        names = [one.resident for one in job.operands.values() if one.resident is not None]
        types = {name: self._info(name).type for name in names}
        if any(types[one.resident] != one.type for one in job.operands.values() if one.resident is not None):
            return Stale(1, tuple(self._info(name) for name in names))
        arrays = {name: self._array(job, name) for name in job.operands}
        out = np.ascontiguousarray(arrays["a"] + arrays["b"])
        view = self._arena.segment.view
        view[job.out_offset : job.out_offset + out.nbytes] = out.tobytes()
        return Done(1, Timings(1000, 0, 2000, 0), 3)

    def _array(self, job: SentJob, field: str) -> Array:
        one = job.operands[field]
        if one.resident is not None:
            return self.residents[one.resident]
        data = bytes(self._arena.segment.view[one.offset : one.offset + one.type.nbytes])
        array: Array = np.frombuffer(data, NUMPY[one.type.dtype])
        return array.reshape(one.type.shape, order="F" if one.fortran else "C")

    def _info(self, name: str) -> TensorInfo:
        array = self.residents[name]
        return TensorInfo(name, TensorType(array.dtype.name, array.shape), 0.0)


class GatewayBench:
    """A gateway and its parts.

    Args:
        authenticator: Who checks keys.
        settings: Further settings.
    """

    def __init__(self, authenticator: Authenticator | None = None, **settings: Any) -> None:
        self.arena = Arena(Segment.create("tests", SEGMENT_BYTES))
        self.engine = SummingEngine(self.arena)
        defaults = Settings(gateways=1, arena_bytes=SEGMENT_BYTES, max_body_bytes=2**21).gateway(0, Inherited(-1), [])
        whole = msgspec.structs.replace(defaults, **settings)
        self.admission = Admission(Room(self.arena, 0.0), whole.max_in_flight, whole.max_body_bytes)
        self.metrics = GatewayMetrics(LocalTotals())
        self.gateway = Gateway(
            whole,
            "0",
            Engines([self.engine]),
            self.arena,
            self.admission,
            self.metrics,
            authenticator or Authenticator(),
        )
        self.server = GatewayServer(self.gateway, create_app(self.gateway))
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[GatewayBench]:
        """Serves, and ends in order: nothing is under way then, and no slot is held."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
            task = asyncio.create_task(self.server.serve(sockets=[listener]))
            await self.server.is_listening.wait()
            try:
                yield self
            finally:
                for writer in self._writers:
                    writer.close()
                    with contextlib.suppress(ConnectionError):
                        await writer.wait_closed()
                self.server.should_exit = True
                await task
        assert self.arena.used_bytes == 0
        assert self.admission.in_flight == 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer


async def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns when it holds."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.001)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, headers in their order, and body; interim answers are left out."""
    while True:
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode("latin-1")
        first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
        status = int(first.split(" ")[1])
        if status != 100:
            return status, headers, await reader.readexactly(int(dict(headers)["content-length"]))
