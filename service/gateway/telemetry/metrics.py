"""What the gateway counts, and `/metrics`: the sum over every process, live or dead.

Owns the request metrics and the exposition. prometheus_client's multiprocess mode keeps each process's figures in a file of a
folder that the supervisor made. Knows no launches; `engine.metrics` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import struct
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, multiprocess
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tilewire.service.errors import BY_CODE
from tilewire.service.gateway.api.v2.answer import VERSION
from tilewire.service.gateway.telemetry.exemplars import Exemplars, WithExemplars
from tilewire.service.ipc.arena import Arena
from tilewire.service.ipc.messages import Timings, Welcome
from tilewire.service.ops.registry import OPS
from tilewire.service.telemetry.counters import SECONDS_BUCKETS, BufferedCounter, BufferedHistogram
from tilewire.service.telemetry.statistics import ModelStats, RequestStatistics, read_statistics, without_statistics

ReadT = TypeVar("ReadT")

DURATION = "tilewire_request_duration_seconds"

# How long observations may wait in this process before other processes can show them.
FLUSH_S = 0.05

# How long the exemplar of a request may wait.
EXEMPLARS_S = 1.0

# A scrape that meets a file in the making reads all of them again.
MAX_READS, READ_AGAIN_S = 20, 0.005


class GatewayMetrics:
    """The gateway's share of `/metrics`.

    Args:
        exemplars: Keeps the last requests of each bucket; None for none.
    """

    def __init__(self, exemplars: Exemplars | None = None) -> None:
        registry = CollectorRegistry()
        self._exemplars = exemplars
        self._write_at: asyncio.TimerHandle | None = None
        self._load: tuple[int, Arena] | None = None
        self._flush_at: asyncio.TimerHandle | None = None
        self._requests = BufferedCounter("tilewire_requests_total", "Requests answered.", ("op", "code"), registry)
        self._duration = BufferedHistogram(
            "tilewire_request_duration_seconds",
            "From a request's headers to the last byte of its answer.",
            ("op",),
            SECONDS_BUCKETS,
            registry,
        )
        self._stages = BufferedHistogram(
            "tilewire_stage_duration_seconds",
            "Time that requests spent in one stage.",
            ("op", "stage"),
            SECONDS_BUCKETS,
            registry,
        )
        # The first request of an op would wait for it.
        self._duration.prepare((op,) for op in OPS)
        self._stages.prepare(itertools.product(OPS, ("receive", "send")))
        self._received = BufferedCounter("tilewire_request_bytes_total", "Bytes of bodies.", ("op",), registry)
        self._sent = BufferedCounter("tilewire_response_bytes_total", "Bytes of answers.", ("op",), registry)
        self._statistics = RequestStatistics(registry)
        self._rejected = Counter(
            "tilewire_rejected_total", "Requests that were refused, by reason.", ("reason",), registry=registry
        )
        for error in BY_CODE.values():
            if error.is_refusal:
                # From 0, so that a rate sees the first one.
                self._rejected.labels(error.code)
        self._key_requests = BufferedCounter(
            "tilewire_key_requests_total", "Requests answered, by the name of their API key.", ("key", "code"), registry
        )
        self._key_bytes = BufferedCounter(
            "tilewire_key_bytes_total", "Bytes of bodies and answers, by the name of their API key.", ("key",), registry
        )
        self._in_flight = Gauge(
            "tilewire_in_flight_requests", "Requests under way.", multiprocess_mode="livesum", registry=registry
        )
        self._arena = Gauge(
            "tilewire_arena_bytes",
            "Shared memory for bodies and results.",
            ("state",),
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._engine_up = Gauge(
            "tilewire_engine_up",
            "Whether the engine is ready.",
            ("device",),
            multiprocess_mode="livemax",
            registry=registry,
        )

    def observe_request(
        self, op: str, code: int, seconds: float, request_id: str = "", trace_id: str | None = None
    ) -> None:
        """Counts one answer."""
        self._requests.inc((op, str(code)))
        self._duration.observe((op,), seconds)
        self._flush_soon()
        if self._exemplars is not None:
            self._exemplars.observe(op, seconds, request_id, trace_id)
            if self._write_at is None:
                self._write_at = asyncio.get_running_loop().call_later(EXEMPLARS_S, self._write_exemplars)

    def observe_key(self, name: str, code: int, nbytes: int) -> None:
        """Counts one answer to the holder of a key; names are those of the keys' file, so they are few."""
        self._key_requests.inc((name, str(code)))
        self._key_bytes.inc((name,), nbytes)

    def observe_outcome(self, op: str, seconds: float, timings: Timings | None) -> None:
        """Counts a request for the protocol's statistics; without timings it failed."""
        self._statistics.count(op, seconds, timings)

    def observe_stage(self, op: str, stage: str, seconds: float) -> None:
        """Counts the time of `receive` or `send`."""
        self._stages.observe((op, stage), seconds)

    def observe_bytes(self, op: str, received: int, sent: int) -> None:
        """Counts the bytes of a body and of its answer."""
        self._received.inc((op,), received)
        self._sent.inc((op,), sent)

    def observe_rejection(self, reason: str) -> None:
        """Counts a refusal."""
        self._rejected.labels(reason).inc()

    def observe_load(self, in_flight: int, arena: Arena) -> None:
        """Notes that the gauges moved; the arena is read when they are handed over."""
        self._load = (in_flight, arena)
        self._flush_soon()

    def flush(self) -> None:
        """Hands everything over that was noted; also at the end of the process."""
        self._flush_at = None
        for buffered in (
            self._requests,
            self._duration,
            self._stages,
            self._received,
            self._sent,
            self._key_requests,
            self._key_bytes,
        ):
            buffered.flush()
        self._statistics.flush()
        if self._load is not None:
            in_flight, arena = self._load
            self._in_flight.set(in_flight)
            self._arena.labels("used").set(arena.used_bytes)
            self._arena.labels("free").set(arena.free_bytes)

    def _write_exemplars(self) -> None:
        """Counts first: an exemplar belongs to one that can be seen."""
        self._write_at = None
        self.flush()
        assert self._exemplars is not None, "This is a bug."
        self._exemplars.write()

    def _flush_soon(self) -> None:
        if self._flush_at is None:
            self._flush_at = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def observe_engine(self, welcome: Welcome, is_up: bool) -> None:
        """Sets whether an engine is up."""
        self._engine_up.labels(welcome.device).set(1 if is_up else 0)


async def expose(folder: str, accept: str) -> tuple[bytes, str]:
    """Writes the exposition over all processes, in a thread: adding their files up would hold up requests for milliseconds.

    Args:
        folder: Where the processes keep their files.
        accept: The scraper's Accept header: OpenMetrics when it takes that.

    Returns:
        The body and its content type.
    """
    registry = CollectorRegistry()
    encoder, content_type = choose_encoder(accept)
    exposed: Collector = _Exposed(folder)
    if content_type.startswith("application/openmetrics-text"):
        exposed = WithExemplars(exposed, Path(folder), DURATION)
    registry.register(exposed)
    return plain_aliases(await _read_again(lambda: encoder(registry))), content_type


async def collect_statistics(metrics: GatewayMetrics, folder: str) -> list[ModelStats]:
    """Adds up the protocol's statistics over all processes.

    Args:
        metrics: This gateway's, which are handed over first; what others hold back is at most `FLUSH_S` old.
        folder: Where the processes keep their files.
    """
    metrics.flush()
    return await _read_again(lambda: read_statistics(folder, tuple(OPS), VERSION))


class _Exposed(Collector):
    """What every process has handed over, without what `/metrics` leaves out."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        every = multiprocess.MultiProcessCollector(None, path=self._folder)  # type: ignore[no-untyped-call]
        return without_statistics(every.collect())  # type: ignore[no-untyped-call]


async def _read_again(read: Callable[[], ReadT]) -> ReadT:
    """Reads the files in a thread; a process that has just started may have made its own and not yet written its head."""
    for _attempt in range(MAX_READS - 1):
        with contextlib.suppress(struct.error, RuntimeError, ValueError, OSError):
            return await asyncio.to_thread(read)
        await asyncio.sleep(READ_AGAIN_S)
    return await asyncio.to_thread(read)


_EXPONENT = re.compile(rb"^(nv_gpu_\w+\{[^}\n]*\} )(\d[\d.]*e[+-]\d+)$", re.MULTILINE)


def plain_aliases(exposition: bytes) -> bytes:
    """Writes the values of the `nv_gpu_` metrics without an exponent: load generators read digits and a point."""
    return _EXPONENT.sub(lambda found: found[1] + format(Decimal(found[2].decode()), "f").encode(), exposition)
