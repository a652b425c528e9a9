"""Values of the engine's loop: clients, job plans, jobs, and the events of the inbox."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch

from tilewire.service.engine.backends.contract import DevicePlace, HostBytes, Running
from tilewire.service.engine.loop.scheduler import Waiting
from tilewire.service.engine.tensors.resident import Resident
from tilewire.service.engine.tensors.shared_regions import Uses
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Cancel, ForgetTemplate, Hello, InputSpec, Job, Template, ToEngine, ToGateway
from tilewire.service.ops.op import AnyOp, Batching, TensorType, Work


class Span(NamedTuple):
    """An operand or a result whose bytes lie on the host.

    Attributes:
        name: Name of the input or output.
        extent: Bytes from the first to the last.
        region: Name of a client's region, or None for the gateway's segment.
        pitch: Bytes from row to row; 0 where rows follow one another.
    """

    name: str
    type: TensorType
    nbytes: int
    extent: int
    fortran: bool = False
    region: str | None = None
    pitch: int = 0


class Binding(NamedTuple):
    """Part of a job plan that depends on resident tensors, for as long as none of them changes.

    Attributes:
        tensors: Resident inputs, by input name.
        key: Batch key: jobs of equal keys may share a launch; None for a job that runs alone.
        signature: Equal for jobs whose launches differ only in addresses.
    """

    residents: Sequence[Resident]
    tensors: Mapping[str, torch.Tensor]
    key: Hashable | None
    signature: Hashable


@dataclass(slots=True, eq=False)
class JobPlan:
    """A template, resolved: everything about its jobs but where their bytes lie.

    Attributes:
        inputs: Inputs on the host, in the order of a job's offsets.
        residents: The other inputs, each behind the name of its resident.
        outputs: Results that leave the device, behind the inputs in the order of a job's offsets.
        kept: Name under which the only result stays on the device, its type, and whether it is durable; None when all leave it.
        batching: Condition for sharing a launch; None when jobs run alone.
        row_shapes: Shape of each output of a launch of one row, where rows are joined.
        rows: Number of rows of the first result, for the cap on a batch.
        host_bytes: Bytes that travel between host and device.
        seconds: Estimated time that a job adds to a launch.
        work: Operations and bytes of a job, by op.
        program: Name of the kept program; empty for an op.
        has_regions: Whether anything lies in a client's region.
    """

    template: Template
    op: AnyOp
    inputs: tuple[Span, ...]
    residents: tuple[tuple[str, InputSpec], ...]
    outputs: tuple[Span, ...]
    kept: tuple[str, TensorType, bool] | None
    batching: Batching[Any] | None
    row_shapes: tuple[tuple[int, ...], ...]
    rows: int
    host_bytes: int
    seconds: float
    work: tuple[Work, ...]
    program: str
    has_regions: bool


@dataclass(slots=True, eq=False)
class Client:
    """One gateway, as the loop sees it.

    Attributes:
        name: Name for the log.
        send: Sends it a message, with the others of this turn; for the loop thread.
        mapped: The segment as the backend sees it; None until it is mapped, and when it is no longer.
        waiting: Queued jobs by id.
        plans: Job plans by number of their template.
        num_launched: Number of its jobs on the device, and of transfers from and to its segment.
        is_gone: Whether its link is lost; it is detached when nothing of it runs.
        tickets: Tensors that wait for it to bring their version.
    """

    name: str
    segment: Segment
    send: Callable[[ToGateway], None]
    mapped: torch.Tensor | None = None
    waiting: dict[int, BoundJob] = field(default_factory=dict)
    plans: dict[int, JobPlan] = field(default_factory=dict)
    num_launched: int = 0
    is_gone: bool = False
    tickets: set[int] = field(default_factory=set)


class BoundJob(Waiting, eq=False, kw_only=True, gc=False):
    """A job with its operands found. Its client holds it while it waits, and lets go of it when the gateway is lost, too.

    Attributes:
        client: Gateway that sent it.
        inputs: Bytes on the host, or resident tensors, by input name.
        outs: Places of the results that leave the device.
        kept: Place of the only result when it stays on the device.
        signature: Equal for jobs whose launches differ only in addresses.
        uses: Regions that it keeps from being unmapped.
    """

    client: Client
    job: Job
    plan: JobPlan
    inputs: dict[str, HostBytes | torch.Tensor]
    outs: list[HostBytes]
    signature: Hashable
    uses: Uses
    kept: DevicePlace | None = None


@dataclass(slots=True)
class Attached:
    """Inbox: a gateway said hello."""

    client: Client


@dataclass(slots=True)
class Lost:
    """Inbox: a gateway's link is gone."""

    client: Client


class Received(msgspec.Struct):
    """Inbox: messages of a gateway that came together."""

    client: Client
    messages: list[ToEngine]


class Changed:
    """Inbox: the vault has changes of other engines."""


@dataclass(slots=True)
class Call:
    """Inbox: another thread has an outcome for the loop's."""

    call: Callable[[], object]


class Stop:
    """Inbox: end the loop when nothing is left to do."""


@dataclass(slots=True, eq=False)
class Launched:
    """A batch on the device.

    Attributes:
        began_ns: Time of the launch.
        seconds: Estimated duration.
    """

    batch: list[BoundJob]
    running: Running
    began_ns: int
    seconds: float = 0.0


def ids_of(*messages: ToEngine) -> dict[str, str | list[str]]:
    """Returns the request ids of messages, as `extra` of a log record."""
    ids = [one.request_id for one in messages if not isinstance(one, Hello | Cancel | Template | ForgetTemplate)]
    return {"request_id": ids[0]} if len(ids) == 1 else {"request_ids": ids}


Event = Attached | Lost | Received | Changed | Call | Stop
