"""The supervisor's sums in the test's own process: figures travel as they would over the control link."""

from __future__ import annotations

from collections.abc import Sequence

from tilewire.service.ipc.messages import FrameDecoder, encode_frame
from tilewire.service.telemetry.counters import Figures, Sample
from tilewire.service.telemetry.exposition import Exposition, Totals
from tilewire.service.telemetry.history import History, HistoryReport


class LocalTotals:
    """What a gateway's or an engine's metrics send to, and what a scraper would see."""

    is_congested = False

    def __init__(self, totals: Totals | None = None, source: str = "local") -> None:
        self.totals = totals or Totals()
        self._source = source
        self._decoder: FrameDecoder[Figures] = FrameDecoder(Figures)

    def send(self, figures: Figures) -> None:
        for message in self._decoder.feed(encode_frame([figures])):
            self.totals.add(self._source, message)

    async def exposition(self, *, openmetrics: bool) -> tuple[bytes, str]:
        return await Exposition(self.totals, 0.0).read(openmetrics=openmetrics)

    async def history(self, key: str | None) -> HistoryReport:
        return History(self.totals).report(key)

    async def hidden(self, models: Sequence[str]) -> list[Sample]:
        return self.totals.hidden(models)
