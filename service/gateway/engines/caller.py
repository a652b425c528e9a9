"""Describes who has a job computed: the client that may leave, the slots of its tensors, deadline, priority and flow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tilewire.service.gateway.auth.flows import NO_FLOW, Flow
from tilewire.service.ipc.arena import Lease


class Departure(Protocol):
    """Reports when a client leaves.

    Attributes:
        is_disconnected: It has left.
    """

    @property
    def is_disconnected(self) -> bool: ...

    def watch(self, on_gone: Callable[[], object]) -> None:
        """Calls `on_gone` once if the client leaves before `unwatch`; at once if it has left."""
        ...

    def unwatch(self) -> None:
        """Ends the watch."""
        ...


class Slots(Protocol):
    """Slots of a request."""

    def hold_until(self, answered: asyncio.Future[Any]) -> None:
        """Keeps the slots from being given back until the engine has answered."""
        ...

    async def wait(self, nbytes: int) -> Lease:
        """Takes one more slot, when there is room.

        Raises:
            TooBusy: There was none within the time-out.
        """
        ...

    def give_back(self, lease: Lease) -> None:
        """Gives one slot back early."""
        ...


class Caller(NamedTuple):
    """Fields of a job beside its template and its offsets.

    Attributes:
        client: When it leaves, the job is cancelled.
        slots: Slots of the job's tensors. When it ends before the engine has answered, they are held until then.
        deadline_ns: Latest start on the machine's monotonic clock; 0 for none.
        priority: 0 is the default, 1 the most urgent of its flow.
        flow: Flow whose share of the device the job takes.
    """

    client: Departure
    slots: Slots
    deadline_ns: int = 0
    priority: int = 0
    flow: Flow = NO_FLOW
