"""Kinds of jobs: the same work as resolving a job anew, for as long as its residents are the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import msgspec
import pytest

from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.loop.jobs import Client, Work
from tilewire.service.engine.loop.kinds import MOST_KEPT, Kind, keep
from tilewire.service.engine.loop.resolve import resolve
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Job, Operand
from tilewire.service.ops.registry import MatmulOptions, TensorType
from tilewire.service.supervisor.vault import VaultWriter

A, B = TensorType("float32", (2, 4)), TensorType("float32", (4, 3))
OUT = TensorType("float32", (2, 3))
JOB = Job(
    1, "matmul", {"a": Operand(A, 256), "b": Operand(B, resident="w")}, MatmulOptions(), OUT, 1024, 48, 104, kind=5
)


class Engine:
    """What jobs are resolved with."""

    def __init__(self) -> None:
        backend = CpuBackend("cpu")
        vault = VaultWriter(-1)
        self.residents = Residents(backend, 2**20, vault)
        self.regions = Regions(backend, vault, max_bytes=2**20)
        self.client = Client("gateway-0", Segment.create("kinds", 4096), lambda _message: None)
        self.client.mapped = backend.attach(self.client.segment)
        self.put()

    def put(self) -> None:
        assert self.client.mapped is not None
        self.residents.put("w", HostBytes(self.client.mapped, B, 512))

    def resolved(self, job: Job) -> Work:
        work = resolve(job, self.client, self.residents, self.regions, 7)
        assert isinstance(work, Work)
        return work

    def again(self, kind: Kind, job: Job) -> Work | None:
        return kind.resolve(job, self.client, self.residents, 8)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.client.mapped = None


def test_another_job_of_the_kind_is_resolved_as_the_long_way_does(engine: Engine) -> None:
    kind = Kind.of(engine.resolved(JOB), engine.residents, "cpu")
    other = msgspec.structs.replace(
        JOB, id=2, operands={**JOB.operands, "a": Operand(A, 640)}, out_offset=2048, deadline_ns=9, priority=3
    )
    work, long = engine.again(kind, other), engine.resolved(other)
    assert work is not None
    assert (work.job, work.arrived_ns, work.host_bytes) == (other, 8, long.host_bytes)
    assert work.step.inputs["b"] is long.step.inputs["b"]
    a = work.step.inputs["a"]
    assert isinstance(a, HostBytes)
    assert (a.mapped is engine.client.mapped, a.type, a.offset) == (True, A, 640)
    assert (work.step.out.offset, work.step.out.type) == (2048, OUT)
    waiting, anew = kind.waiting(work), Kind.of(long, engine.residents, "cpu").waiting(long)
    for name in ("key", "deadline_ns", "priority", "rows", "nbytes", "seconds"):
        assert getattr(waiting, name) == getattr(anew, name), name
    assert engine.residents.get("w").hits == 3


def test_a_replaced_or_deleted_resident_is_another_kind_and_is_not_kept(engine: Engine) -> None:
    kind = Kind.of(engine.resolved(JOB), engine.residents, "cpu")
    gone = weakref.ref(engine.residents.get("w").tensor)
    engine.put()
    assert engine.again(kind, JOB) is None
    assert engine.residents.get("w").hits == 0
    gc.collect()
    assert gone() is None
    kind = Kind.of(engine.resolved(JOB), engine.residents, "cpu")
    assert engine.again(kind, JOB) is not None
    engine.residents.delete("w")
    assert engine.again(kind, JOB) is None


@pytest.mark.parametrize(("a_at", "out_at"), [(4096 - 31, 0), (-1, 0), (0, 4096 - 23), (0, -1)])
def test_an_operand_outside_the_segment_is_a_bug(engine: Engine, a_at: int, out_at: int) -> None:
    kind = Kind.of(engine.resolved(JOB), engine.residents, "cpu")
    wrong = msgspec.structs.replace(JOB, operands={**JOB.operands, "a": Operand(A, a_at)}, out_offset=out_at)
    with pytest.raises(AssertionError, match="outside its segment"):
        engine.again(kind, wrong)


def test_only_numbered_jobs_without_regions_are_kept_and_not_for_ever(engine: Engine) -> None:
    kind = Kind.of(engine.resolved(JOB), engine.residents, "cpu")
    in_region = {**JOB.operands, "a": Operand(A, 0, region="r")}
    for other in ({"kind": 0}, {"operands": in_region}, {"out_region": "r"}):
        keep(engine.client, msgspec.structs.replace(JOB, **other), kind)
    assert not engine.client.kinds
    for number in range(1, MOST_KEPT + 2):
        keep(engine.client, msgspec.structs.replace(JOB, kind=number), kind)
    assert len(engine.client.kinds) == 1
