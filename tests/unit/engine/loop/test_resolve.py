"""Jobs of a template: offsets bound and checked each time, residents as they are now and never kept alive."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tests.support.jobs import JobBench, template_of
from tests.support.resident_chain import put as put_resident
from tests.support.transfers import MovedAtOnce
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.loop.jobs import BoundJob, JobPlan
from tilewire.service.engine.loop.resolve import bind, plan_of
from tilewire.service.errors import UnknownName
from tilewire.service.ipc.messages import Job, Stale
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import AnyOp, OpOptions, TensorType

A, B = TensorType("float32", (2, 4)), TensorType("float32", (4, 3))
OUT = TensorType("float32", (2, 3))


@pytest.fixture
def bench() -> Iterator[JobBench]:
    bench = JobBench(4096)
    put(bench, torch.ones(4, 3))
    yield bench
    bench.close()


@pytest.fixture
def plan() -> JobPlan:
    return plan_of(template_of("matmul", MatmulOptions(), {"a": A, "b": B}, {"b": "w"}), "cpu")


def put(bench: JobBench, values: torch.Tensor) -> None:
    kind = TensorType("float32", tuple(values.shape))
    put_resident(bench.residents, "w", HostBytes(values.reshape(-1).view(torch.uint8), kind, 0))


def bound(bench: JobBench, plan: JobPlan, *offsets: int, now_ns: int = 7) -> BoundJob:
    job = bind(Job(1, 1, offsets, 9, 3), plan, bench.client, bench.bindings, bench.regions, now_ns)
    assert isinstance(job, BoundJob)
    return job


def test_jobs_differ_in_where_their_bytes_lie(bench: JobBench, plan: JobPlan) -> None:
    one, other = bound(bench, plan, 256, 1024), bound(bench, plan, 640, 2048, now_ns=8)
    a = other.inputs["a"]
    assert isinstance(a, HostBytes)
    assert (a.mapped is bench.mapped, a.type, a.offset, a.fortran) == (True, A, 640, False)
    assert [(out.offset, out.type) for out in other.outs] == [(2048, OUT)]
    assert (other.arrived_ns, other.deadline_ns, other.priority) == (8, 9, 3)
    assert other.inputs["b"] is bench.residents.get("w").tensor
    assert one.key == other.key is not None
    assert one.signature is other.signature
    assert (other.rows, other.nbytes) == (2, A.nbytes + OUT.nbytes)
    assert bench.residents.get("w").hits == 2


def test_a_job_that_demands_a_version_of_a_file_takes_no_other(bench: JobBench) -> None:
    """Each engine reads the file at its own start."""
    values = torch.ones(4, 3)
    source = HostBytes(values.reshape(-1).view(torch.uint8), B, 0)
    bench.residents.add([("file", source)], MovedAtOnce(bench.backend).run, 2.0)
    for version, kind in ((2_000_000, BoundJob), (1_000_000, Stale)):
        template = template_of("matmul", MatmulOptions(), {"a": A, "b": B}, {"b": "file"})
        a, b = template.inputs
        pinned = msgspec.structs.replace(template, inputs=(a, msgspec.structs.replace(b, version=version)))
        job = Job(1, 1, (256, 1024), 9, 3)
        assert isinstance(bind(job, plan_of(pinned, "cpu"), bench.client, bench.bindings, bench.regions, 7), kind)


class TurningBackend(CpuBackend):
    """A device that lays out every resident anew."""

    def lay_out(self, tensor: torch.Tensor, op: AnyOp, name: str, options: OpOptions) -> torch.Tensor:
        """See `Backend`."""
        return tensor.mT.contiguous().mT


def test_the_first_job_that_reads_a_tensor_has_it_laid_out() -> None:
    bench = JobBench(4096, backend=TurningBackend())
    put(bench, torch.arange(12.0).view(4, 3))
    plans = [plan_of(template_of("matmul", MatmulOptions(), {"a": A, "b": B}, {"b": "w"}), "cpu") for _ in range(2)]
    wide = TensorType("float32", (4, 5))
    unfit = plan_of(template_of("matmul", MatmulOptions(), {"a": A, "b": wide}, {"b": "w"}), "cpu")
    before = bench.residents.get("w").tensor
    # One of another type has none.
    assert isinstance(bind(Job(1, 1, (256, 1024)), unfit, bench.client, bench.bindings, bench.regions, 7), Stale)
    assert bench.residents.get("w").tensor is before
    first = bound(bench, plans[0], 256, 1024).inputs["b"]
    assert isinstance(first, torch.Tensor)
    assert first.stride() == (1, 4)
    assert torch.equal(first, torch.arange(12.0).view(4, 3))
    # What others have read stays as it is.
    assert bound(bench, plans[1], 256, 1024).inputs["b"] is first is bench.residents.get("w").tensor
    put(bench, torch.zeros(4, 3))
    again = bound(bench, plans[1], 256, 1024).inputs["b"]
    assert isinstance(again, torch.Tensor)
    assert again.stride() == (1, 4)
    bench.close()


def test_a_replaced_resident_gives_another_key_and_is_not_kept(bench: JobBench, plan: JobPlan) -> None:
    first = bound(bench, plan, 256, 1024)
    key, signature, gone = first.key, first.signature, weakref.ref(bench.residents.get("w").tensor)
    del first
    put(bench, torch.zeros(4, 3))
    gc.collect()
    assert gone() is None
    second = bound(bench, plan, 256, 1024)
    assert second.key != key
    assert second.signature != signature
    assert second.inputs["b"] is bench.residents.get("w").tensor


def test_jobs_of_other_plans_are_not_looked_up_again_when_a_resident_changes(bench: JobBench, plan: JobPlan) -> None:
    kind = TensorType("float32", (4, 3))
    put_resident(bench.residents, "other", HostBytes(torch.zeros(48, dtype=torch.uint8), kind, 0))
    first = bound(bench, plan, 256, 1024)
    bench.residents.delete("other")
    assert bound(bench, plan, 256, 1024).signature is first.signature
    put(bench, torch.zeros(4, 3))
    assert bound(bench, plan, 256, 1024).signature is not first.signature


def test_a_resident_that_leaves_the_device_is_not_kept_and_not_found(bench: JobBench, plan: JobPlan) -> None:
    gone = weakref.ref(bound(bench, plan, 256, 1024).inputs["b"])
    bench.residents.give_up("w")
    gc.collect()
    assert gone() is None
    with pytest.raises(UnknownName):
        bound(bench, plan, 256, 1024)


def test_a_plan_that_is_forgotten_leaves_nothing(bench: JobBench, plan: JobPlan) -> None:
    before = sys.getrefcount(plan)
    bound(bench, plan, 256, 1024)
    assert sys.getrefcount(plan) > before
    bench.bindings.forget(plan)
    assert sys.getrefcount(plan) == before
    put(bench, torch.zeros(4, 3))
    assert bound(bench, plan, 256, 1024).inputs["b"] is bench.residents.get("w").tensor


def test_a_resident_may_be_both_operands(bench: JobBench) -> None:
    square = TensorType("float32", (4, 4))
    plan = plan_of(template_of("matmul", MatmulOptions(), {"a": square, "b": square}, {"a": "w", "b": "w"}), "cpu")
    for values in (torch.ones(4, 4), torch.zeros(4, 4)):
        put(bench, values)
        job = bound(bench, plan, 0)
        assert job.inputs["a"] is job.inputs["b"] is bench.residents.get("w").tensor
    bench.bindings.forget(plan)
    bench.residents.delete("w")


def test_a_resident_of_another_type_is_stale_and_a_deleted_one_unknown(bench: JobBench, plan: JobPlan) -> None:
    put(bench, torch.ones(4, 5))
    job = Job(5, 1, (256, 1024))
    stale = bind(job, plan, bench.client, bench.bindings, bench.regions, 7)
    assert stale == Stale(5, (bench.residents.info("w"),))
    assert bench.residents.get("w").hits == 0
    bench.residents.delete("w")
    with pytest.raises(UnknownName, match=r"^b: no resident tensor 'w'"):
        bind(job, plan, bench.client, bench.bindings, bench.regions, 7)


@pytest.mark.parametrize(("a_at", "out_at"), [(4096 - 31, 0), (-1, 0), (0, 4096 - 23), (0, -1)])
def test_an_operand_outside_the_segment_is_a_bug(bench: JobBench, plan: JobPlan, a_at: int, out_at: int) -> None:
    with pytest.raises(AssertionError, match="outside its segment"):
        bound(bench, plan, a_at, out_at)


@pytest.mark.parametrize("offsets", [(), (0,), (0, 256, 512)])
def test_offsets_that_are_not_the_templates_are_a_bug(bench: JobBench, plan: JobPlan, offsets: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="not the template's offsets"):
        bound(bench, plan, *offsets)
