"""From a gateway's message to what a backend can compute: where each operand lies, and that it lies inside.

Knows no queue and no launch. Runs in the engine's loop thread.
"""

from __future__ import annotations

import torch

from service.engine.backends.contract import HostBytes, Step
from service.engine.regions import OUT, Regions, Use
from service.engine.residents import Resident, Residents
from service.engine.work import Client, Work
from service.messages import Job, Operand, Stale, TensorInfo
from service.ops import TensorType


def resolve(job: Job, client: Client, residents: Residents, regions: Regions, now_ns: int) -> Work | Stale:
    """Finds a job's operands as they are now, so that it finishes with them whatever is replaced or unregistered meanwhile.

    Returns:
        The work, whose regions are in use until they are released; or what a resident's type is by now.

    Raises:
        UnknownName: No such resident or region.
        InvalidRequest: A tensor does not lie inside its region.
    """
    inputs: dict[str, HostBytes | torch.Tensor] = {}
    uses: dict[str, Use] = {}
    found: dict[str, Resident] = {}
    for name, operand in job.operands.items():
        if operand.resident is not None:
            found[name] = residents.get(operand.resident, field=name)
        elif operand.region is not None:
            uses[name] = regions.find(operand.region, operand.offset, operand.type, field=name)
            inputs[name] = regions.bytes_of(uses[name], operand.type)
        else:
            inputs[name] = in_segment(client, operand.type, operand.offset, fortran=operand.fortran)
    stale = _stale(job, found)
    if stale:
        return Stale(job.id, stale)
    if job.out_region is None:
        out = in_segment(client, job.out, job.out_offset)
    else:
        uses[OUT] = regions.find(job.out_region, job.out_offset, job.out, field="out", is_out=True)
        out = regions.bytes_of(uses[OUT], job.out)
    inputs |= {name: residents.use(resident) for name, resident in found.items()}
    regions.hold(uses)
    return Work(client, job, Step(job.op, job.options, inputs, out), now_ns, uses)


def in_segment(client: Client, kind: TensorType, offset: int, *, fortran: bool = False) -> HostBytes:
    """Bytes in a gateway's segment; gateways are ours, but memory is not trusted to them."""
    assert client.mapped is not None, "This is a bug."
    is_inside = 0 <= offset <= offset + kind.nbytes <= client.mapped.numel()
    assert is_inside, "This is a bug: an operand outside its segment."
    return HostBytes(client.mapped, kind, offset, fortran)


def _stale(job: Job, found: dict[str, Resident]) -> tuple[TensorInfo, ...]:
    return tuple(
        resident.info(_name_of(job.operands[name]))
        for name, resident in found.items()
        if resident.type != job.operands[name].type
    )


def _name_of(operand: Operand) -> str:
    assert operand.resident is not None, "This is a bug."
    return operand.resident
