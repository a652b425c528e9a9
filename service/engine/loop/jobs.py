"""What the engine's threads pass to one another: clients, work, and the events of the inbox. Knows no thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tilewire.service.engine.backends.contract import Running, Step
from tilewire.service.engine.loop.scheduler import Waiting
from tilewire.service.engine.tensors.shared_regions import Uses
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Cancel, Hello, Job, ToEngine, ToGateway
from tilewire.service.ops.registry import OPS

if TYPE_CHECKING:
    from tilewire.service.engine.loop.kinds import Kind


@dataclass(slots=True, eq=False)
class Client:
    """One gateway, as the loop sees it.

    Attributes:
        name: For the log.
        segment: Its arena.
        send: Sends it a message, with the others of this turn; for the loop thread.
        mapped: The segment as the backend sees it; None before attach and after detach.
        waiting: Its queued jobs by id.
        kinds: Kinds of jobs that it has sent, by its numbers.
        num_launched: Its jobs on the device.
        is_gone: Its link is lost; detach when nothing of it runs.
    """

    name: str
    segment: Segment
    send: Callable[[ToGateway], None]
    mapped: torch.Tensor | None = None
    waiting: dict[int, Waiting[Work]] = field(default_factory=dict)
    kinds: dict[int, Kind] = field(default_factory=dict)
    num_launched: int = 0
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """A job and what its launch needs.

    Attributes:
        client: Who asked.
        job: What for.
        step: Its operands, resolved.
        arrived_ns: When.
        host_bytes: What it reads and writes on the host.
        uses: The regions that it keeps from being unmapped.
    """

    client: Client
    job: Job
    step: Step
    arrived_ns: int
    host_bytes: int = 0
    uses: Uses = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The dtype of its first input, for labels."""
        return self.job.operands[OPS[self.job.op].required[0]].type.dtype


@dataclass(slots=True)
class Attached:
    """Inbox: a gateway said hello."""

    client: Client


@dataclass(slots=True)
class Lost:
    """Inbox: a gateway's link is gone."""

    client: Client


@dataclass(slots=True)
class Received:
    """Inbox: a gateway's message."""

    client: Client
    message: ToEngine


class Changed:
    """Inbox: the vault has changes of the home engine."""


class Stop:
    """Inbox: end the loop when nothing is left to do."""


@dataclass(slots=True)
class Launched:
    """A batch on the device.

    Attributes:
        batch: Its jobs.
        running: What the backend says of it.
        began_ns: When it was launched.
        seconds: That it is predicted to take.
    """

    batch: list[Work]
    running: Running
    began_ns: int
    seconds: float = 0.0


def ids_of(*messages: ToEngine) -> dict[str, str | list[str]]:
    """The requests that an event of the log is about, as their clients know them: `extra` of a record."""
    ids = [message.request_id for message in messages if not isinstance(message, Hello | Cancel)]
    return {"request_id": ids[0]} if len(ids) == 1 else {"request_ids": ids}


Event = Attached | Lost | Received | Changed | Stop
