"""From a gateway's message to what a backend can compute: where each operand lies, and that it lies inside.

Knows no queue and no launch. Runs in the engine's loop thread.
"""

from __future__ import annotations

import torch

from tilewire.service.engine.backends.contract import HostBytes, Step
from tilewire.service.engine.loop.jobs import Client, Work
from tilewire.service.engine.tensors.residents import Resident, Residents
from tilewire.service.engine.tensors.shared_regions import OUT, Regions, Use
from tilewire.service.ipc.messages import Job, Stale, TensorInfo
from tilewire.service.ops.registry import TensorType


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
    found: list[Resident] = []
    stale: list[TensorInfo] = []
    host_bytes = 0
    for name, operand in job.operands.items():
        if operand.resident is not None:
            resident = residents.get(operand.resident, field=name)
            if resident.type != operand.type:
                stale.append(resident.info(operand.resident))
            found.append(resident)
            inputs[name] = resident.tensor
            continue
        nbytes = operand.type.nbytes
        host_bytes += nbytes
        if operand.region is None:
            inputs[name] = _bytes_at(client, operand.type, operand.offset, nbytes, operand.fortran)
        else:
            uses[name] = regions.find(operand.region, operand.offset, operand.type, field=name)
            inputs[name] = regions.bytes_of(uses[name], operand.type)
    if stale:
        return Stale(job.id, tuple(stale))
    out_bytes = job.out.nbytes
    if job.out_region is None:
        out = _bytes_at(client, job.out, job.out_offset, out_bytes)
    else:
        uses[OUT] = regions.find(job.out_region, job.out_offset, job.out, field="out", is_out=True)
        out = regions.bytes_of(uses[OUT], job.out)
    for resident in found:
        residents.use(resident)
    if uses:
        regions.hold(uses)
    return Work(client, job, Step(job.op, job.options, inputs, out), now_ns, host_bytes + out_bytes, uses)


def in_segment(client: Client, kind: TensorType, offset: int, *, fortran: bool = False) -> HostBytes:
    """Bytes in a gateway's segment; gateways are ours, but memory is not trusted to them."""
    return _bytes_at(client, kind, offset, kind.nbytes, fortran)


def _bytes_at(client: Client, kind: TensorType, offset: int, nbytes: int, fortran: bool = False) -> HostBytes:
    assert client.mapped is not None, "This is a bug."
    is_inside = 0 <= offset <= offset + nbytes <= client.segment.nbytes
    assert is_inside, "This is a bug: an operand outside its segment."
    return HostBytes(client.mapped, kind, offset, fortran)
