"""A gateway's server whose engine answers at once and computes nothing. Knows no load and no question."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from tilewire.service.config.process import Inherited
from tilewire.service.config.settings import Settings
from tilewire.service.errors import Unavailable
from tilewire.service.gateway.__main__ import GatewayServer
from tilewire.service.gateway.app import create_app
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
    Job,
    Template,
    TensorInfo,
    Tensors,
    Timings,
    Warming,
    Welcome,
    encode_frame,
)
from tilewire.service.ops.op import TensorType
from tilewire.service.telemetry.counters import Figures, Sample
from tilewire.service.telemetry.history import HistoryReport

WEIGHT = TensorType("float16", (4096, 4096))


class IdleEngine:
    """Knows one resident, `w`. What is sent to it is put into frames, as for a real one."""

    residing = NOT_RESIDING
    welcome: Welcome | None = Welcome(0, "none", "none", "no device", "", "")
    warming: Warming | None = None
    outstanding = 0

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    def send(self, request: Command) -> tuple[int, asyncio.Future[Reply]]:
        """See `Engine.send`; the reply comes in the loop's next turn."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        number = next(self._ids)
        assert isinstance(request, DescribeTensor), "It has no other questions."
        loop.call_soon(future.set_result, Tensors(number, (TensorInfo("w", WEIGHT, 0.0),)))
        return number, future

    def submit(self, template: Template, offsets: tuple[int, ...], caller: Caller) -> tuple[int, asyncio.Future[Reply]]:
        """See `Engine.submit`; the reply comes in the loop's next turn."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        number = next(self._ids)
        encode_frame([Job(number, template.id, offsets, caller.deadline_ns, caller.priority, "0" * 32)])
        loop.call_soon(future.set_result, Done(number, Timings(1000, 1000, 1000, 1000, 5), 1))
        return number, future

    def cancel(self, request_id: int, *, is_late: bool = False) -> asyncio.Future[None]:
        """See `Engine.cancel`."""
        return asyncio.get_running_loop().create_future()


class NoTotals:
    """Takes figures, and adds nothing up. What is sent to it is put into frames, as for a real supervisor."""

    is_congested = False

    def send(self, figures: Figures) -> None:
        """See `Sink.send`."""
        encode_frame([figures])

    async def exposition(self, *, openmetrics: bool) -> tuple[bytes, str]:
        """See `Totals.exposition`."""
        raise Unavailable("nothing is added up here")

    async def hidden(self, models: Sequence[str]) -> list[Sample]:
        """See `Totals.hidden`."""
        raise Unavailable("nothing is added up here")

    async def history(self, key: str | None) -> HistoryReport:
        """See `Totals.history`."""
        raise Unavailable("nothing is added up here")


def make_idle_server(segment_bytes: int) -> GatewayServer:
    """A server with an arena of that size."""
    arena = Arena(Segment.create("idle", segment_bytes))
    settings = Settings(gateways=1, arena_bytes=segment_bytes).gateway(0, Inherited(-1), [])
    admission = Admission(Room(arena, settings.room_timeout_s), settings.max_in_flight, settings.max_body_bytes)
    gateway = Gateway(settings, "0", Engines([IdleEngine()]), arena, admission, GatewayMetrics(NoTotals()))
    return GatewayServer(gateway, create_app(gateway))
