"""Runs tests of one run side by side, and those that measure time alone. Owns the lock between pytest's workers."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
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
        self.door, self.room = (os.open(path, os.O_RDONLY) for path in (door, room))

    @contextlib.contextmanager
    def held(self, *, alone: bool) -> Iterator[None]:
        """Waits for a turn, and has it until the block ends."""
        fcntl.flock(self.door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self.room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self.door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Not by closing: a process forked meanwhile has the file open, too.
            fcntl.flock(self.room, fcntl.LOCK_UN)
