"""Defines and counts the gateway's metrics, and fetches what all processes counted from the supervisor.

Owns the request metrics; those of launches are in `engine.metrics`.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from tilewire.service.errors import BY_CODE
from tilewire.service.gateway.api.v2.answer import VERSION
from tilewire.service.gateway.codecs.negotiation import qualities_of
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.ipc.arena import Arena
from tilewire.service.ipc.messages import Timings, Welcome
from tilewire.service.ops.registry import OPS
from tilewire.service.telemetry.counters import Failure, MetricSet, Sample, Sink
from tilewire.service.telemetry.history import HistoryReport
from tilewire.service.telemetry.statistics import ModelStats, RequestStatistics, statistics_of

# How long observations may wait in this process before other processes can show them.
FLUSH_S = 0.05

# Models whose statistics are read before others have their turn: each has 13 sums, and 4 more for each size of its batches.
MODELS_AT_ONCE = 16

BAD_REQUEST = 400

OPENMETRICS = "application/openmetrics-text"

# OpenMetrics allows this many characters over all names and values of an exemplar's labels.
MAX_LABEL_CHARACTERS = 128

# Clients choose request ids, and a character that some parser quotes otherwise would cost the whole scrape.
_PLAIN = re.compile(rf"[A-Za-z0-9._:@/+=-]{{1,{MAX_LABEL_CHARACTERS - len('request_id')}}}", re.ASCII)


class Totals(Sink, Protocol):
    """Takes figures and returns the sums over all processes; Unavailable is raised when the supervisor is gone."""

    async def exposition(self, *, openmetrics: bool) -> tuple[bytes, str]:
        """Returns the text of `/metrics` and its content type."""
        ...

    async def hidden(self, models: Sequence[str]) -> list[Sample]:
        """Returns the sums that `/metrics` does not show, of the ops and kept programs of these names."""
        ...

    async def history(self, key: str | None) -> HistoryReport:
        """Returns the last minutes, with the failures of a key of this name, or of everybody for None."""
        ...


class EndedRequest(msgspec.Struct, frozen=True, gc=False):
    """Figures of a request that has ended.

    Attributes:
        op: Name of the op; None for another route.
        code: HTTP status.
        seconds: From its headers to the last byte of its answer.
        receive_s: Seconds in which its body came and was read; 0 without one.
        send_s: Seconds in which its answer left; 0 for an error.
        received_bytes: Bytes of the body.
        sent_bytes: Bytes of the answer's body.
        timings: Stage times of the engine; None when it was not computed.
        request_id: Label of the exemplar.
        trace_id: Label of the exemplar, or None.
        model: Name of the kept program; empty for an op.
        key: Name of the API key; None without one. Names are those of the keys' file, so they are few.
        failure: Entry for the list of the last failures; None for a result.
        unix_s: Time of its end.
    """

    op: str | None
    code: int
    seconds: float
    receive_s: float = 0.0
    send_s: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    timings: Timings | None = None
    request_id: str = ""
    trace_id: str | None = None
    model: str = ""
    key: str | None = None
    failure: Failure | None = None
    unix_s: float = msgspec.field(default_factory=time.time)


class GatewayMetrics:
    """The gateway's share of `/metrics`."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._metrics = metrics = MetricSet(totals)
        self._load: tuple[Admission, Arena] | None = None
        self._ended: list[EndedRequest] = []
        self._flush_at: asyncio.TimerHandle | None = None
        self._reading: dict[bool, asyncio.Task[tuple[bytes, str]]] = {}
        self._waiting: dict[bool, asyncio.Task[tuple[bytes, str]]] = {}
        self._requests = metrics.counter("tilewire_requests_total", "Requests answered.", ("op", "code"))
        self._duration = metrics.histogram(
            "tilewire_request_duration_seconds",
            "From a request's headers to the last byte of its answer.",
            ("op",),
        )
        self._stages = metrics.histogram(
            "tilewire_stage_duration_seconds", "Time that requests spent in one stage.", ("op", "stage")
        )
        self._received = metrics.counter("tilewire_request_bytes_total", "Bytes of bodies.", ("op",))
        self._sent = metrics.counter("tilewire_response_bytes_total", "Bytes of answers.", ("op",))
        self._statistics = RequestStatistics(metrics)
        self._rejected = metrics.counter(
            "tilewire_rejected_total", "Requests that were refused, by reason.", ("reason",)
        )
        self._key_requests = metrics.counter(
            "tilewire_key_requests_total", "Requests answered, by the name of their API key.", ("key", "code")
        )
        self._key_bytes = metrics.counter(
            "tilewire_key_bytes_total", "Bytes of bodies and answers, by the name of their API key.", ("key",)
        )
        self._in_flight = metrics.gauge("tilewire_in_flight_requests", "Requests under way.")
        self._arena = metrics.gauge("tilewire_arena_bytes", "Shared memory for bodies and results.", ("state",))
        self._engine_up = metrics.gauge("tilewire_engine_up", "Whether the engine is ready.", ("device",), merge="max")
        self._reload_failed = metrics.gauge(
            "tilewire_reload_failed",
            "Whether a changed file cannot be used, so that the gateways go on with what it had.",
            ("file",),
            merge="max",
        )
        # From 0, so that a rate sees the first one.
        self._rejected.prepare((error.code,) for error in BY_CODE.values() if error.is_refusal)
        self._duration.prepare((op,) for op in OPS)
        self._stages.prepare(itertools.product(OPS, ("receive", "send")))
        self._metrics.flush()

    def observe_request(self, ended: EndedRequest) -> None:
        """Counts a request and its answer; at the next flush, together with others."""
        self._ended.append(ended)
        if self._flush_at is None:
            self.observe_load()

    def follow_load(self, admission: Admission, arena: Arena) -> None:
        """Sets what the gauges of the load are read from at each flush."""
        self._load = (admission, arena)

    def observe_load(self) -> None:
        """Notes that the gauges of the load moved: all that was noted is sent soon."""
        if self._flush_at is None:
            self._flush_at = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def observe_engine(self, welcome: Welcome, is_up: bool) -> None:
        """Sets whether an engine is up."""
        self._engine_up.set((welcome.device,), 1 if is_up else 0)
        self.flush()

    def follow_file(self, file: Literal["api_keys", "certificate"]) -> Callable[[bool], object]:
        """Returns the report of a `FileWatch`, which any thread may call."""
        loop = asyncio.get_running_loop()

        def observe(is_current: bool) -> None:
            self._reload_failed.set((file,), 0 if is_current else 1)
            self.flush()

        return lambda is_current: loop.call_soon_threadsafe(observe, is_current)

    def flush(self) -> None:
        """Sends everything that was noted; also at the end of the process."""
        if self._flush_at is not None:
            self._flush_at.cancel()
            self._flush_at = None
        self._count_ended()
        self._statistics.flush()
        if self._load is not None:
            admission, arena = self._load
            self._in_flight.set((), admission.in_flight)
            self._arena.set(("used",), arena.used_bytes)
            self._arena.set(("free",), arena.free_bytes)
        self._metrics.flush()

    def _count_ended(self) -> None:
        ended, self._ended = self._ended, []
        self._count_keys([one for one in ended if one.key is not None])
        self._count_failures([one.failure for one in ended if one.failure is not None])
        by_op: defaultdict[str, list[EndedRequest]] = defaultdict(list)
        for one in ended:
            if one.op is None:
                continue
            by_op[one.op].append(one)
            self._statistics.count(one.op, one.model, one.seconds, one.timings if one.code < BAD_REQUEST else None)
        for op, requests in by_op.items():
            for code, count in Counter([one.code for one in requests]).items():
                self._requests.inc((op, str(code)), count)
            self._received.inc((op,), sum([one.received_bytes for one in requests]))
            self._sent.inc((op,), sum([one.sent_bytes for one in requests]))
            self._stages.observe_all((op, "receive"), [one.receive_s for one in requests if one.receive_s])
            self._stages.observe_all((op, "send"), [one.send_s for one in requests if one.send_s])
            shown: set[int] = set()
            buckets = self._duration.observe_all((op,), [one.seconds for one in requests])
            # The last one first: of each bucket, the last one whose id can be shown is its exemplar.
            for bucket, one in zip(reversed(buckets), reversed(requests), strict=True):
                if bucket not in shown and (exemplar := exemplar_of(one.request_id, one.trace_id)) is not None:
                    self._duration.show((op,), bucket, one.seconds, one.unix_s, exemplar)
                    shown.add(bucket)

    def _count_keys(self, ended: Sequence[EndedRequest]) -> None:
        """Counts the requests of holders of keys."""
        for (name, code), count in Counter([(one.key or "", one.code) for one in ended]).items():
            self._key_requests.inc((name, str(code)), count)
        for one in ended:
            self._key_bytes.inc((one.key or "",), one.received_bytes + one.sent_bytes)

    def _count_failures(self, failures: Sequence[Failure]) -> None:
        """Counts refusals, and notes the last failures."""
        for reason, count in Counter([failure.reason for failure in failures]).items():
            if BY_CODE[reason].is_refusal:
                self._rejected.inc((reason,), count)
        for failure in failures:
            self._metrics.note(failure)

    async def expose(self, accept: str) -> tuple[bytes, str]:
        """Returns the text of `/metrics` over all processes, and its content type: OpenMetrics when `accept` takes that.

        All calls while an answer is on its way share the next one.

        Raises:
            Unavailable: The supervisor is gone.
        """
        openmetrics = qualities_of(accept).get(OPENMETRICS, 0) > 0
        if openmetrics not in self._waiting:
            self._waiting[openmetrics] = asyncio.create_task(self._expose(openmetrics=openmetrics))
        return await asyncio.shield(self._waiting[openmetrics])

    async def _expose(self, *, openmetrics: bool) -> tuple[bytes, str]:
        if (reading := self._reading.get(openmetrics)) is not None:
            await asyncio.wait([reading])
        # Later callers may miss in this answer the events that were counted just before.
        self._reading[openmetrics] = self._waiting.pop(openmetrics)
        self.flush()
        return await self._totals.exposition(openmetrics=openmetrics)

    async def statistics(self, models: Sequence[str]) -> list[ModelStats]:
        """Returns the protocol's statistics over all processes; what others hold back is at most `FLUSH_S` old.

        Raises:
            Unavailable: The supervisor is gone.
        """
        self.flush()
        found: list[ModelStats] = []
        for begin in range(0, len(models), MODELS_AT_ONCE):
            some = models[begin : begin + MODELS_AT_ONCE]
            found += statistics_of(await self._totals.hidden(some), some, VERSION)
        return found

    async def history(self, key: str | None) -> HistoryReport:
        """Returns the last minutes over all processes, with the failures of a key of this name, or of everybody for None.

        Raises:
            Unavailable: The supervisor is gone.
        """
        self.flush()
        return await self._totals.history(key)


def exemplar_of(request_id: str, trace_id: str | None) -> Mapping[str, str] | None:
    """Returns the labels of an exemplar, as many as fit; None for an id that cannot be shown."""
    if _PLAIN.fullmatch(request_id) is None:
        return None
    labels = {"request_id": request_id}
    if trace_id is not None and sum(map(len, ("request_id", request_id, "trace_id", trace_id))) <= MAX_LABEL_CHARACTERS:
        labels["trace_id"] = trace_id
    return labels
