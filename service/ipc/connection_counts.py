"""Shares the number of connections of each gateway among them, without messages and locks.

Each gateway writes its own number only. That of one that died stays until its successor begins.
"""

from __future__ import annotations

import mmap
import os

from tilewire.service.ipc.arena import make_sealed

ITEM_BYTES = 8
# A gateway has its share with so many connections more than the one with the least, and with an eighth more.
SLACK, SLACK_SHARE = 1, 8


def create_counts(num_gateways: int) -> int:
    """Returns the descriptor of a page of zeros."""
    return make_sealed("tilewire-connections", num_gateways * ITEM_BYTES)


class ConnectionCounts:
    """One gateway's view of the page.

    Args:
        fd: Descriptor of the page, which stays the caller's; negative for a gateway that is alone.
        index: Index of this gateway.
    """

    def __init__(self, fd: int = -1, index: int = 0) -> None:
        self._page = memoryview(mmap.mmap(fd, os.fstat(fd).st_size if fd >= 0 else ITEM_BYTES)).cast("Q")
        self._index = index
        self._page[index] = 0

    @property
    def own(self) -> int:
        """Number of this gateway's connections."""
        return self._page[self._index]

    def add(self, number: int) -> None:
        """Changes the number of this gateway's connections."""
        self._page[self._index] += number

    @property
    def has_share(self) -> bool:
        """Whether this gateway has its share: others should take the next connection."""
        least = min(self._page)
        return self.own > least + SLACK + least // SLACK_SHARE
