"""Keeps the event loop from sleeping while an answer or the next request is due: waking takes as long as a small product.

Owns the decision when to poll. Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import time

# With more requests under way the loop has enough to do, and cores are better left to the other gateways.
MAX_OUTSTANDING = 2

# A client that sends again as soon as it is answered is back within this.
LINGER_S = 0.3e-3


class BusyPoller:
    """Turns the loop round and round for some seconds after a request was sent; 0 for never."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._linger_s = min(seconds, LINGER_S)
        self._until_s = 0.0
        self._is_turning = False
        self._outstanding = 0

    def sent(self) -> None:
        """A request has left for an engine."""
        self._outstanding += 1
        if self._outstanding <= MAX_OUTSTANDING:
            self._poll(self._seconds)

    def answered(self, count: int = 1) -> None:
        """Replies have come, or never will."""
        self._outstanding -= count
        if not self._outstanding:
            self._poll(self._linger_s)

    def _poll(self, seconds: float) -> None:
        if not seconds:
            return
        self._until_s = time.monotonic() + seconds
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        # A callback that is due makes the loop poll its sockets without waiting for them.
        if self._outstanding <= MAX_OUTSTANDING and time.monotonic() < self._until_s:
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._is_turning = False
