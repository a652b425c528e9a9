"""Runs tests side by side, and those marked `alone` by themselves. Owns the lock between pytest's workers."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Turns:
    """A lock that many processes hold together, or one alone.

    A process that waits to be alone keeps the door shut, so that no later one overtakes it.

    Args:
        door: A file or folder. Everybody passes it one by one.
        room: Another one.

    Raises:
        OSError: One of them does not exist.
    """

    def __init__(self, door: Path, room: Path) -> None:
        self._door, self._room = (os.open(path, os.O_RDONLY) for path in (door, room))
        self._is_alone = False

    def take(self, *, alone: bool) -> None:
        """Waits for a turn; at once where this process has it alone already."""
        if self._is_alone:
            return
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            self._is_alone = alone
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)

    def end(self) -> None:
        """Ends the turn."""
        # Not by closing: a process forked meanwhile has the file open, too.
        fcntl.flock(self._room, fcntl.LOCK_UN)
        self._is_alone = False
