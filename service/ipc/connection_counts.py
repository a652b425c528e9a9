"""Shares among gateways how many connections each has and whether it is ready, without messages and locks.

Each gateway writes its own entries only. The supervisor clears those of one that died before it starts another.
"""

from __future__ import annotations

import mmap
import os

from tilewire.service.ipc.arena import make_sealed

# A number of connections, and behind those of all gateways 1 for each that is ready.
ITEM_BYTES, NUM_ITEMS = 8, 2
# A gateway has its share with so many connections more than the one with the least, and with an eighth more.
SLACK, SLACK_SHARE = 1, 8


def create_counts(num_gateways: int) -> int:
    """Returns the descriptor of a page of zeros."""
    return make_sealed("tilewire-connections", num_gateways * NUM_ITEMS * ITEM_BYTES)


class ConnectionCounts:
    """One gateway's view of the page.

    Args:
        fd: Descriptor of the page, which stays the caller's; negative for a gateway that is alone.
        index: Index of this gateway.
    """

    def __init__(self, fd: int = -1, index: int = 0) -> None:
        nbytes = os.fstat(fd).st_size if fd >= 0 else NUM_ITEMS * ITEM_BYTES
        page = memoryview(mmap.mmap(fd, nbytes)).cast("Q")
        self._counts, self._ready = page[: len(page) // NUM_ITEMS], page[len(page) // NUM_ITEMS :]
        self._index = index

    def clear(self) -> None:
        """Begins with no connections, and not ready."""
        self._counts[self._index] = self._ready[self._index] = 0

    @property
    def own(self) -> int:
        """Number of this gateway's connections."""
        return self._counts[self._index]

    def add(self, number: int) -> None:
        """Changes the number of this gateway's connections."""
        self._counts[self._index] += number

    def set_ready(self, *, is_ready: bool) -> None:
        """Says whether this gateway computes requests."""
        self._ready[self._index] = is_ready

    @property
    def is_behind(self) -> bool:
        """Whether another gateway is ready and this one is not."""
        return not self._ready[self._index] and any(self._ready)

    @property
    def has_share(self) -> bool:
        """Whether this gateway has its share: others, as ready as any, should take the next connection."""
        best = max(self._ready)
        least = min(count for count, ready in zip(self._counts, self._ready, strict=True) if ready == best)
        return self.own > least + SLACK + least // SLACK_SHARE
