"""Bounds the requests of one stream that are under way, by their number and by the size of its answers. Knows no call."""

from __future__ import annotations

import asyncio

# Requests of one stream that are under way at once; the next ones stay unread.
MAX_AHEAD = 16
# An answer that is smaller than those before lets the size that is expected fall by this part of it.
FADE = 8


class Window:
    """Places for the requests of a stream, each from before it is read until its answer was sent.

    Slots of answers are held until the client reads, so answers of `max_bytes` together may be ahead of it. The size of the
    next is expected to be that of those before; until the first is known, one request is under way.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._expected_bytes = 0
        self._num = 0
        self._limit = 1
        self._freed = asyncio.Event()

    async def enter(self) -> None:
        """Waits for a place, and takes it."""
        while self._num >= self._limit:
            self._freed.clear()
            await self._freed.wait()
        self._num += 1

    def note(self, nbytes: int) -> None:
        """Takes note of an answer's size; more requests may have places then, or fewer."""
        expected_bytes = self._expected_bytes
        self._expected_bytes = max(nbytes, expected_bytes - expected_bytes // FADE, 1)
        self._limit = min(MAX_AHEAD, max(1, self._max_bytes // self._expected_bytes))
        self._freed.set()

    def leave(self) -> None:
        """Gives a place back."""
        self._num -= 1
        self._freed.set()
