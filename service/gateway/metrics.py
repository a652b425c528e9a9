"""What the gateway counts, and `/metrics`: the sum over every process, live or dead.

Owns the request metrics and the exposition. prometheus_client's multiprocess mode keeps each process's figures in a file of a
folder that the supervisor made. Knows no launches; `engine.metrics` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct

from prometheus_client import CollectorRegistry, Counter, Gauge, multiprocess
from prometheus_client.exposition import choose_encoder

from service.arena import Arena
from service.counting import SECONDS_BUCKETS, BufferedCounter, BufferedHistogram
from service.messages import Welcome

# How long observations may wait in this process before other processes can show them.
FLUSH_S = 0.05

# A scrape that meets a file in the making reads all of them again.
MAX_READS, READ_AGAIN_S = 20, 0.005


class GatewayMetrics:
    """The gateway's share of `/metrics`."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._load = (0, 0, 0)
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
        self._received = BufferedCounter("tilewire_request_bytes_total", "Bytes of bodies.", ("op",), registry)
        self._sent = BufferedCounter("tilewire_response_bytes_total", "Bytes of answers.", ("op",), registry)
        self._rejected = Counter(
            "tilewire_rejected_total", "Requests refused or failed, by reason.", ("reason",), registry=registry
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

    def observe_request(self, op: str, code: int, seconds: float) -> None:
        """Counts one answer."""
        self._requests.inc((op, str(code)))
        self._duration.observe((op,), seconds)
        self._flush_soon()

    def observe_stage(self, op: str, stage: str, seconds: float) -> None:
        """Counts the time of `receive` or `send`."""
        self._stages.observe((op, stage), seconds)

    def observe_bytes(self, op: str, received: int, sent: int) -> None:
        """Counts the bytes of a body and of its answer."""
        self._received.inc((op,), received)
        self._sent.inc((op,), sent)

    def observe_rejection(self, reason: str) -> None:
        """Counts an error answer."""
        self._rejected.labels(reason).inc()

    def observe_load(self, in_flight: int, arena: Arena) -> None:
        """Notes the gauges."""
        self._load = (in_flight, arena.used_bytes, arena.free_bytes)
        self._flush_soon()

    def flush(self) -> None:
        """Hands everything over that was noted; also at the end of the process."""
        self._flush_at = None
        for buffered in (self._requests, self._duration, self._stages, self._received, self._sent):
            buffered.flush()
        in_flight, used, free = self._load
        self._in_flight.set(in_flight)
        self._arena.labels("used").set(used)
        self._arena.labels("free").set(free)

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
    multiprocess.MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    encoder, content_type = choose_encoder(accept)
    for _attempt in range(MAX_READS - 1):
        # A process that has just started may have made its file and not yet written the file's head.
        with contextlib.suppress(struct.error, RuntimeError, ValueError, OSError):
            return await asyncio.to_thread(encoder, registry), content_type
        await asyncio.sleep(READ_AGAIN_S)
    return await asyncio.to_thread(encoder, registry), content_type
