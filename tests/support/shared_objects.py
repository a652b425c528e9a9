"""POSIX shared-memory objects for tests, as files: with keys of their own, gone at the end. Knows no client library."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIX = "tilewire-test-"


@contextlib.contextmanager
def shared_object(content: bytes | int) -> Iterator[Path]:
    """An object that holds `content`, or as many zeros; yields its file, whose name is its key."""
    path = FOLDER / f"{PREFIX}{os.getpid()}-{os.urandom(6).hex()}"
    with path.open("xb") as file:
        if isinstance(content, int):
            file.truncate(content)
        else:
            file.write(content)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
