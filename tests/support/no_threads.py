"""A system that allows a process no more threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

# Of a stack; no system has room for one.
IMPOSSIBLE_BYTES = 2**46


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """No thread can be started meanwhile."""
    before = threading.stack_size(IMPOSSIBLE_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
