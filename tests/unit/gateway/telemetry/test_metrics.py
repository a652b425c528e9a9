"""Statistics of many models: they are read in parts, so that other requests have their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.support.local_totals import LocalTotals
from tilewire.service.gateway.telemetry.metrics import MODELS_AT_ONCE, EndedRequest, GatewayMetrics
from tilewire.service.telemetry.counters import Sample


class RecordedTotals(LocalTotals):
    """Records which models are asked for, and how many sums are answered."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, ...]] = []
        self.sums: list[int] = []

    async def hidden(self, models: Sequence[str]) -> list[Sample]:
        found = await super().hidden(models)
        self.asked.append(tuple(models))
        self.sums.append(len(found))
        return found


NAMES = [f"p{number}" for number in range(3 * MODELS_AT_ONCE + 1)]


async def counted() -> tuple[RecordedTotals, GatewayMetrics]:
    """Metrics of one failed request for each program."""
    totals = RecordedTotals()
    metrics = GatewayMetrics(totals)
    for name in NAMES:
        metrics.observe_request(EndedRequest("program", 400, 1.0, model=name))
    return totals, metrics


def test_statistics_of_many_models_are_read_in_parts() -> None:
    async def run() -> None:
        totals, metrics = await counted()
        found = await metrics.statistics(["add", *NAMES])
        assert [one.name for one in found] == ["add", *NAMES]
        assert [one.inference_stats.fail.count for one in found] == [0, *(1 for _ in NAMES)]
        assert sum(totals.asked, ()) == ("add", *NAMES)
        assert max(map(len, totals.asked)) == MODELS_AT_ONCE

    asyncio.run(run())


def test_statistics_of_one_model_read_nothing_of_others() -> None:
    async def run() -> None:
        totals, metrics = await counted()
        await metrics.statistics(NAMES[:1])
        assert totals.asked == [("p0",)]
        first = totals.sums.pop()
        await metrics.statistics(NAMES[:3])
        assert totals.sums == [3 * first]
        assert first > 0

    asyncio.run(run())
