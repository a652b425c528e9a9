"""Gateways' arenas: mapped for the device before a gateway is welcomed, unmapped when nothing of a lost one runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from tilewire.service.engine.backends.contract import Backend
from tilewire.service.engine.loop.jobs import Client
from tilewire.service.engine.tensors.host_mappings import Mappings, unmapping

logger = logging.getLogger(__name__)


class Arenas:
    """The arenas of one engine's gateways. All methods are for the loop thread.

    Args:
        backend: Maps and unmaps.
        mappings: Does so beside the loop.
        on_mapped: Called in the loop thread with each gateway whose arena is mapped.
    """

    def __init__(self, backend: Backend, mappings: Mappings, on_mapped: Callable[[Client], None]) -> None:
        self._backend = backend
        self._mappings = mappings
        self._on_mapped = on_mapped

    def map(self, client: Client) -> None:
        """Begins to map the arena of a gateway."""

        def end(mapped: torch.Tensor) -> None:
            client.mapped = mapped
            self._on_mapped(client)

        self._mappings.begin(lambda: self._backend.attach(client.segment), end)

    def unmap(self, client: Client) -> None:
        """Begins to unmap and close the arena of a gateway, which nothing may use any more."""
        assert client.mapped is not None, "This is a bug: an arena that is not mapped."
        work = unmapping(self._backend, client.mapped, client.segment.close)
        client.mapped = None
        self._mappings.begin(work, lambda _: logger.info("%s detached", client.name))
