"""Maps gateways' arenas for the device, and unmaps them, in a thread of its own.

Pinning gigabytes takes as long as loading every kernel. The loop answers other gateways meanwhile, and prepares at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tilewire.service.engine.backends.contract import Backend
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import Call, Client

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Arenas:
    """Maps one arena after another. All methods are for the loop thread.

    Args:
        backend: Maps and unmaps.
        mailbox: Gets what follows, as calls for the loop thread. An error of the backend is raised there.
        on_mapped: Called in the loop thread with each gateway whose arena is mapped.
    """

    def __init__(self, backend: Backend, mailbox: Mailbox, on_mapped: Callable[[Client], None]) -> None:
        self._backend = backend
        self._mailbox = mailbox
        self._on_mapped = on_mapped
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arenas")

    def map(self, client: Client) -> None:
        """Begins to map the arena of a gateway."""

        def end(mapped: torch.Tensor) -> None:
            client.mapped = mapped
            self._on_mapped(client)

        self._begin(lambda: self._backend.attach(client.segment), end)

    def unmap(self, client: Client) -> None:
        """Begins to unmap and close the arena of a gateway, which nothing may use any more."""
        assert client.mapped is not None, "This is a bug: an arena that is not mapped."
        held = [client.mapped]
        client.mapped = None

        def work() -> None:
            self._backend.detach(held[0])
            # Nobody else holds it, so the segment can be closed.
            held.clear()
            client.segment.close()

        self._begin(work, lambda _: logger.info("%s detached", client.name))

    def close(self) -> None:
        """Returns when everything that was begun is over."""
        self._thread.shutdown()

    def _begin(self, work: Callable[[], T], end: Callable[[T], None]) -> None:
        future = self._thread.submit(work)
        future.add_done_callback(lambda done: self._mailbox.post(Call(lambda: end(done.result()))))
