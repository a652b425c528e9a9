"""What jobs of one kind have in common, worked out once: where their bytes lie, and whose they are, is all that differs.

A gateway that sends the same kind of job again says so (`Job.kind`). Knows no queue and no launch. Runs in the engine's loop
thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass

from tilewire.service.engine.backends.contract import HostBytes, Step
from tilewire.service.engine.loop.batching import key_of, rows_of
from tilewire.service.engine.loop.cost_estimate import predict_s
from tilewire.service.engine.loop.jobs import Client, Work
from tilewire.service.engine.loop.scheduler import Waiting
from tilewire.service.engine.tensors.residents import Resident, Residents
from tilewire.service.ipc.messages import Job
from tilewire.service.ops.registry import TensorType

# Of one gateway; more are forgotten, and worked out again.
MOST_KEPT = 4096


@dataclass(eq=False, slots=True)
class Kind:
    """One kind of job.

    Attributes:
        key: Of its batches; see `forms.key_of`.
        rows: Of its result.
        seconds: That it adds to a launch; see `pace`.
        host_bytes: What it reads and writes on the host.
        sources: Its operands in the segment: name, type, bytes, whether in Fortran order.
        residents: The others: name, the resident's name, and the resident itself, which must not live on for this.
        out: Type of its result, and its bytes.
    """

    key: Hashable | None
    rows: int
    seconds: float
    host_bytes: int
    sources: tuple[tuple[str, TensorType, int, bool], ...]
    residents: tuple[tuple[str, str, weakref.ref[Resident]], ...]
    out: tuple[TensorType, int]

    @classmethod
    def of(cls, work: Work, residents: Residents, backend: str) -> Kind:
        """The kind of a job that was resolved the long way.

        Args:
            work: The job. Only one that has a number is resolved by its kind again.
            residents: Where its residents are.
            backend: `gpu` or `cpu`.
        """
        job, named, sources = work.job, [], []
        for name, operand in job.operands.items() if job.kind else ():
            if operand.resident is not None:
                named.append((name, operand.resident, weakref.ref(residents.get(operand.resident))))
            else:
                sources.append((name, operand.type, operand.type.nbytes, operand.fortran))
        return cls(
            key=key_of(job, work.step.inputs),
            rows=rows_of(job),
            seconds=predict_s(backend, job.flops, work.host_bytes),
            host_bytes=work.host_bytes,
            sources=tuple(sources),
            residents=tuple(named),
            out=(job.out, job.out.nbytes),
        )

    def waiting(self, work: Work) -> Waiting[Work]:
        """A job of this kind, as the scheduler takes it."""
        job = work.job
        return Waiting(
            work,
            self.key,
            work.arrived_ns,
            job.deadline_ns,
            job.priority,
            self.rows,
            self.host_bytes,
            self.seconds,
        )

    def resolve(self, job: Job, client: Client, residents: Residents, now_ns: int) -> Work | None:
        """Finds the operands of another job of this kind; None when a resident was replaced meanwhile."""
        inputs = {}
        for name, resident_name, ref in self.residents:
            resident = residents.find(resident_name)
            if resident is None or ref() is not resident:
                return None
            inputs[name] = resident.tensor
        for _, resident_name, _ in self.residents:
            residents.use(residents.get(resident_name))
        mapped, segment_bytes = client.mapped, client.segment.nbytes
        assert mapped is not None, "This is a bug."
        placed: dict[str, HostBytes] = {}
        for name, kind, nbytes, fortran in self.sources:
            offset = job.operands[name].offset
            assert 0 <= offset <= segment_bytes - nbytes, "This is a bug: an operand outside its segment."
            placed[name] = HostBytes(mapped, kind, offset, fortran)
        kind, nbytes = self.out
        assert 0 <= job.out_offset <= segment_bytes - nbytes, "This is a bug: a result outside its segment."
        out = HostBytes(mapped, kind, job.out_offset)
        return Work(client, job, Step(job.op, job.options, {**inputs, **placed}, out), now_ns, self.host_bytes)


def keep(client: Client, job: Job, kind: Kind) -> None:
    """Remembers the kind of a job under the number that its gateway gave it, if it gave one and nothing lies in a region."""
    if not job.kind or job.out_region is not None or any(one.region is not None for one in job.operands.values()):
        return
    if len(client.kinds) >= MOST_KEPT:
        client.kinds.clear()
    client.kinds[job.kind] = kind
