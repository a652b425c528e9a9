"""Processes that work for another: forked from one that has imported their needs, and gone with their caller."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing import forkserver


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """Ends the server that workers are forked from, which would keep its imports until this process ends."""
    try:
        yield
    finally:
        # Python has no public call for this; where it has none at all, memory is all that is lost.
        with contextlib.suppress(AttributeError):
            forkserver._forkserver._stop()  # type: ignore[attr-defined]


def end_with_parent() -> None:
    """Ends a worker when its caller is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "This is a bug."

    def wait_and_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()
