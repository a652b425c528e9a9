"""Descriptors that this process has open. Those of earlier tests may be closed meanwhile, so tests ask for what is new."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_OPEN = Path("/proc/self/fd")


def open_descriptors() -> set[tuple[str, Path]]:
    """Their numbers, and what they are of."""
    found = set()
    for link in _OPEN.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add((link.name, link.readlink()))
    return found


def num_opened(before: set[tuple[str, Path]]) -> int:
    """How many were not open `before`."""
    return len(open_descriptors() - before)


def num_of_file(inode: int) -> int:
    """How many are of this file."""
    found = 0
    for link in _OPEN.iterdir():
        with contextlib.suppress(OSError):
            found += os.fstat(int(link.name)).st_ino == inode
    return found
