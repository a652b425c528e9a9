"""Copies residents from an engine whose queue lasts to one that idles. Runs in the gateway's event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from tilewire.service.errors import TilewireError
from tilewire.service.gateway.engines.client import Engine
from tilewire.service.gateway.engines.directory import Directory
from tilewire.service.gateway.engines.locator import Locator

logger = logging.getLogger(__name__)

# Requests of this gateway on one engine from which some of them wait.
QUEUED = 4
# How long there must be a queue, and the time between two copies: they cost the busy engine a part of its time.
LASTING_S, PAUSE_S = 0.5, 5.0


class Spread:
    """Watches how long engines have a queue, and has residents copied."""

    def __init__(
        self,
        engines: Sequence[Engine],
        directory: Directory,
        locator: Locator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._directory = directory
        self._locator = locator
        self._clock = clock
        self._begun_s = [0.0] * len(engines)
        # The queue was seen last; it is another one after a time without requests.
        self._seen_s = [-math.inf] * len(engines)
        self._next_s = -math.inf
        self._copying: asyncio.Task[None] | None = None

    def note(self, index: int, fields: Mapping[str, str]) -> None:
        """Takes note of a request that goes to an engine; `fields` are its inputs by the names of their residents."""
        if len(self._engines) == 1 or self._engines[index].outstanding < QUEUED:
            self._seen_s[index] = -math.inf
            return
        now_s = self._clock()
        if now_s - self._seen_s[index] > LASTING_S:
            self._begun_s[index] = now_s
        self._seen_s[index] = now_s
        if now_s - self._begun_s[index] < LASTING_S or now_s < self._next_s:
            return
        idle = next((other for other, one in enumerate(self._engines) if one.welcome and not one.outstanding), None)
        if idle is not None:
            self._next_s = now_s + PAUSE_S
            self._copying = asyncio.get_running_loop().create_task(self._copy(fields, idle))

    async def _copy(self, fields: Mapping[str, str], index: int) -> None:
        try:
            for name, field in fields.items():
                mark = self._directory.mark_of(name)
                info = await self._locator.describe(name, field=field)
                if not self._directory.serves(index, name):
                    await self._locator.bring(index, info, mark)
        except TilewireError as error:
            logger.info("no copy of a resident for an idle engine: %s", error)
