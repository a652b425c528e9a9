"""Ends reads of messages that take too long. Runs in the gateway's event loop."""

from __future__ import annotations

import asyncio

# Reason of a cancellation that is not the client's.
STALLED = "stalled"
# Longest time of a timer, in seconds, for settings without a bound.
FOREVER_S = 1e6


class Stalls:
    """Cancels tasks that read for more than `max_s` seconds.

    One timer serves all reads, since a timer for each costs more than the rest of a read. It is set for the oldest one.
    """

    def __init__(self, max_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_s = min(max_s, FOREVER_S)
        # When each task began to read, the oldest first.
        self._began_s: dict[asyncio.Task[object], float] = {}
        self._is_timed = False

    def begin(self, task: asyncio.Task[object]) -> None:
        """Bounds the time of a task's read."""
        self._began_s[task] = self._loop.time()
        if not self._is_timed:
            self._is_timed = True
            self._loop.call_later(self._max_s, self._look)

    def end(self, task: asyncio.Task[object]) -> None:
        """Ends the bound."""
        self._began_s.pop(task, None)

    def _look(self) -> None:
        now_s = self._loop.time()
        while self._began_s:
            task, began_s = next(iter(self._began_s.items()))
            left_s = began_s + self._max_s - now_s
            if left_s > 0:
                self._loop.call_later(left_s, self._look)
                return
            del self._began_s[task]
            task.cancel(STALLED)
        self._is_timed = False
