"""Keeps the last ten minutes of the service: requests, refusals and latency by interval, and the last failures.

Owns the ring that `GET /v1/history` shows. Runs in the supervisor, over all processes, live or dead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tilewire.service.telemetry.counters import SECONDS_BUCKETS, Failure, Labels

if TYPE_CHECKING:
    # What is kept is read in gateways, which have no prometheus_client.
    from tilewire.service.telemetry.exposition import Totals

logger = logging.getLogger(__name__)

# Ten minutes in steps that a chart of some hundred pixels can show; some 100 bytes each.
PERIOD_S = 5.0
MAX_INTERVALS = 120

REQUESTS, SECONDS = "tilewire_requests_total", "tilewire_request_duration_seconds"
REJECTED, KERNEL_S = "tilewire_rejected_total", "tilewire_kernel_seconds_total"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Sums = dict[Labels, tuple[int | float, ...]]


class Interval(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sums of one interval.

    Attributes:
        end: Unix time of its end, in seconds.
        seconds: Length.
        requests: Requests answered, by op.
        statuses: Requests answered with an error, by status.
        latency: Seconds by name of the percentile; empty without requests.
        kernel_seconds: Seconds in which kernels ran.
    """

    end: float
    seconds: float
    requests: dict[str, int] = {}
    statuses: dict[str, int] = {}
    refused: dict[str, int] = {}
    latency: dict[str, float] = {}
    kernel_seconds: float = 0.0


class HistoryReport(msgspec.Struct, frozen=True):
    """All that is kept.

    Attributes:
        period_s: Length of an interval.
        intervals: The oldest first.
        failures: The last one first.
    """

    period_s: float
    intervals: list[Interval]
    failures: list[Failure]


class History:
    """Ring of intervals, each of `period_s` seconds."""

    def __init__(self, totals: Totals, period_s: float = PERIOD_S) -> None:
        self._totals = totals
        self._period_s = period_s
        self._intervals: deque[Interval] = deque(maxlen=MAX_INTERVALS)
        self._last: dict[str, Sums] = {}
        self._last_s = time.monotonic()

    async def keep(self) -> None:
        """Adds an interval every period; until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            try:
                self.note(time.monotonic(), time.time())
            except Exception:
                # The process beside it holds what clients uploaded, which is worth more than a chart.
                logger.exception("an interval of the history is left out")

    def note(self, now_s: float, unix_s: float) -> None:
        """Ends an interval at a moment of the monotonic clock, and of Unix time, in seconds."""
        requests, refused = self._increases(REQUESTS), self._increases(REJECTED)
        by_op: dict[str, int] = {}
        by_status: dict[str, int] = {}
        for (op, code), (count,) in requests.items():
            by_op[op] = by_op.get(op, 0) + int(count)
            if int(code) >= 400:
                by_status[code] = by_status.get(code, 0) + int(count)
        observed = [values[:-1] for values in self._increases(SECONDS).values()]
        counts = [int(sum(column)) for column in zip(*observed, strict=True)]
        self._intervals.append(
            Interval(
                round(unix_s, 3),
                round(now_s - self._last_s, 3),
                by_op,
                by_status,
                {labels[0]: int(count) for labels, (count,) in refused.items()},
                {name: quantile(q, counts, SECONDS_BUCKETS) for name, q in QUANTILES.items()} if any(counts) else {},
                sum(values[0] for values in self._increases(KERNEL_S).values()),
            )
        )
        self._last_s = now_s

    def report(self, name: str | None) -> HistoryReport:
        """Returns all that is kept, with the failures of a key of this name, or of all and of nobody for None."""
        return HistoryReport(self._period_s, list(self._intervals), self._totals.failures.newest(name))

    def _increases(self, name: str) -> Sums:
        """Series that grew since the last call, and by how much."""
        now = self._totals.sums(name)
        before = self._last.get(name, {})
        self._last[name] = now
        grown = {
            labels: tuple(new - old for new, old in zip(values, before.get(labels, (0,) * len(values)), strict=True))
            for labels, values in now.items()
            if values != before.get(labels)
        }
        return {labels: values for labels, values in grown.items() if any(values)}


def quantile(q: float, counts: Sequence[int], bounds: Sequence[float]) -> float:
    """Estimates a quantile, 0 to 1, as Prometheus does: linear inside its bucket.

    The last bucket has no upper bound. Not all counts are 0.
    """
    rest, begin = q * sum(counts), 0.0
    for count, end in zip(counts, bounds, strict=False):
        if count and rest <= count:
            return begin + (end - begin) * rest / count
        rest -= count
        begin = end
    return begin
