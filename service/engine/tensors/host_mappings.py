"""Maps host memory for the device, and unmaps it, in a thread of its own: gateways' arenas and clients' regions.

Pinning gigabytes takes as long as loading every kernel. The loop answers others meanwhile, and prepares at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from tilewire.service.engine.backends.contract import Backend

T = TypeVar("T")


class Mappings(Protocol):
    """Does one piece of work after another, beside the loop."""

    def begin(self, work: Callable[[], T], end: Callable[[T], object]) -> None:
        """Begins a piece of work.

        Args:
            work: Maps or unmaps.
            end: Called in the loop thread with what `work` returned. What it raises is raised there.
        """
        ...

    def close(self) -> None:
        """Returns when everything that was begun is over."""
        ...


class HostMappings(Mappings):
    """A thread that maps and unmaps.

    Args:
        post: Has a function called in the loop thread; called by the other one.
    """

    def __init__(self, post: Callable[[Callable[[], object]], object]) -> None:
        self._post = post
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mappings")

    def begin(self, work: Callable[[], T], end: Callable[[T], object]) -> None:
        future = self._thread.submit(work)
        future.add_done_callback(lambda done: self._post(lambda: end(done.result())))

    def close(self) -> None:
        self._thread.shutdown()


def unmapping(backend: Backend, mapped: torch.Tensor | None, close: Callable[[], None]) -> Callable[[], None]:
    """Returns the work of unmapping memory, which lets go of it and calls `close` then. The caller lets go of it, too."""
    held = [mapped]

    def work() -> None:
        if held[0] is not None:
            backend.detach(held[0])
        held.clear()
        close()

    return work
