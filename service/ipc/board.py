"""Shares the version of the last change of every name between engines and gateways, without messages and locks.

Names fall into slots. The home engine of a slot orders all changes of its names, and is the only one that writes the slot. An
engine serves a name when it has followed the home engine up to the version in the name's slot.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from functools import lru_cache

from tilewire.service.ipc.arena import make_sealed

SLOTS = 8192
BOARD_BYTES = SLOTS * 8
# Rankings that a process keeps, of 230 bytes each. One for each slot would let a gateway grow by 2 MB for hours, as names come.
MAX_RANKINGS = 1024


def slot_of(name: str) -> int:
    """Returns the slot of a resident's name."""
    return zlib.crc32(name.encode()) % SLOTS


@lru_cache(maxsize=MAX_RANKINGS)
def ranking(slot: int, num_engines: int) -> tuple[int, ...]:
    """Returns the engines in the order of their rendezvous hash for a slot; the first is its home."""
    scores = [hashlib.blake2b(b"%d/%d" % (engine, slot)).digest() for engine in range(num_engines)]
    return tuple(sorted(range(num_engines), key=lambda engine: scores[engine], reverse=True))


def home_of(name: str, num_engines: int) -> int:
    """Returns the index of the engine that orders the changes of a name."""
    return ranking(slot_of(name), num_engines)[0]


def create_board() -> int:
    """Returns the descriptor of an empty board."""
    return make_sealed("tilewire-board", BOARD_BYTES)


class VersionBoard:
    """One process's view of the board.

    Args:
        fd: Descriptor of the board, which stays the caller's; negative for one that nobody else sees.

    Attributes:
        versions: Version of the last change in each slot; 0 for none.
    """

    def __init__(self, fd: int = -1) -> None:
        page = mmap.mmap(fd, BOARD_BYTES)
        # Eight bytes are stored at once: a reader sees the old version or the new one.
        self.versions = memoryview(page).cast("Q")

    def write(self, name: str, version: int) -> None:
        """Records a change, before it is acknowledged; for the home engine of the name."""
        self.versions[slot_of(name)] = version
