"""Keeps the event loop from sleeping while an answer is due soon: waking takes as long as a small product.

Owns when. Knows no message. Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import time

# With more requests under way the loop has enough to do, and cores are better left to the other gateways.
MOST_OUTSTANDING = 2


class Poller:
    """Turns the loop round and round for a moment.

    Args:
        seconds: How long after a request was sent; 0 for never.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until_s = 0.0
        self._is_turning = False
        self._outstanding = 0

    def sent(self) -> None:
        """A request has left for an engine."""
        self._outstanding += 1
        if self._seconds and self._outstanding <= MOST_OUTSTANDING:
            self._until_s = time.monotonic() + self._seconds
            if not self._is_turning:
                self._is_turning = True
                asyncio.get_running_loop().call_soon(self._turn)

    def answered(self, count: int = 1) -> None:
        """Replies have come, or never will."""
        self._outstanding -= count

    def _turn(self) -> None:
        # A callback that is due makes the loop ask its sockets without waiting for them.
        if 0 < self._outstanding <= MOST_OUTSTANDING and time.monotonic() < self._until_s:
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._is_turning = False
