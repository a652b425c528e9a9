"""Jobs as an engine gets them: what a fake engine was sent, and jobs over a segment, bound by the engine's own code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.support.mappings import MappedAtOnce
from tests.support.resident_chain import put
from tilewire.service.engine.backends.contract import Backend, HostBytes
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.backends.host import dtype_name, tensor_of
from tilewire.service.engine.loop.jobs import BoundJob, Client
from tilewire.service.engine.loop.resolve import Bindings, bind, plan_of
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import InputSpec, Job, OutputSpec, Template
from tilewire.service.ops.op import Limits, OpOptions, TensorType
from tilewire.service.ops.planning import plan
from tilewire.service.ops.registry import op_for
from tilewire.service.supervisor.vault import VaultWriter


class SentOperand(NamedTuple):
    """An input of a job that was sent; the offset of a resident is -1."""

    type: TensorType
    offset: int
    resident: str | None
    fortran: bool
    region: str | None


class SentJob(NamedTuple):
    """A job that a gateway has sent."""

    template: Template
    offsets: tuple[int, ...]
    deadline_ns: int
    priority: int

    @property
    def op(self) -> str:
        return self.template.op

    @property
    def options(self) -> OpOptions:
        return self.template.options

    @property
    def operands(self) -> dict[str, SentOperand]:
        offsets = iter(self.offsets)
        return {
            one.name: SentOperand(
                one.type, next(offsets) if one.resident is None else -1, one.resident, one.fortran, one.region
            )
            for one in self.template.inputs
        }

    @property
    def out(self) -> TensorType:
        return self.template.outputs[0].type

    @property
    def out_offset(self) -> int:
        return self.offsets[-len(self.template.outputs)]


def template_of(
    op: str,
    options: OpOptions,
    inputs: dict[str, TensorType],
    residents: dict[str, str] | None = None,
    *,
    fortran: Sequence[str] = (),
    regions: dict[str, str] | None = None,
    store: str | None = None,
    number: int = 1,
) -> Template:
    """A template, planned as a gateway does."""
    found = op_for(op, options)
    planned = plan(found, inputs, options, Limits())
    specs = [
        InputSpec(name, kind, (residents or {}).get(name), (regions or {}).get(name), name in fortran)
        for name, kind in inputs.items()
    ]
    names = zip(found.outputs, planned.outputs, strict=True)
    outputs = tuple(OutputSpec(kind, (regions or {}).get(name), store) for name, kind in names)
    return Template(number, op, tuple(specs), options, outputs, planned.flops, planned.moved_bytes)


class JobBench:
    """A gateway's segment that fills up, residents, and jobs over them.

    Args:
        nbytes: Size of the segment.
        align: Tensors begin at multiples of this.
        backend: Makes the memory of residents.
    """

    def __init__(self, nbytes: int = 2**20, align: int = 256, backend: Backend | None = None) -> None:
        self.backend = backend or CpuBackend()
        vault = VaultWriter(-1)
        self.residents = Residents(self.backend, 2**40, vault)
        self.bindings = Bindings(self.residents)
        self.regions = Regions(self.backend, vault, MappedAtOnce(), max_bytes=2**20, max_copied_bytes=2**20)
        self.client = Client("gateway-0", Segment.create("tests", nbytes), lambda _message: None)
        self.client.mapped = self.mapped = self.backend.attach(self.client.segment)
        self.end = 0
        self._align = align
        self._ids = itertools.count(1)
        self._names: dict[int, tuple[str, torch.Tensor]] = {}

    def place(self, kind: TensorType, *, fortran: bool = False) -> HostBytes:
        """Room for a tensor."""
        host = HostBytes(self.mapped, kind, self.end, fortran)
        self.end += -(-kind.nbytes // self._align) * self._align
        assert self.end <= self.mapped.numel(), "The segment is too small for this test."
        return host

    def put(self, values: torch.Tensor, *, fortran: bool = False) -> HostBytes:
        """A tensor with its values."""
        host = self.place(TensorType(dtype_name(values.dtype), tuple(values.shape)), fortran=fortran)
        tensor_of(host).copy_(values)
        return host

    def resident(self, values: torch.Tensor) -> str:
        """Makes a tensor resident, once; its name."""
        if id(values) not in self._names:
            name = f"w{len(self._names)}"
            kind = TensorType(dtype_name(values.dtype), tuple(values.shape))
            flat = values.contiguous().view(-1).view(torch.uint8)
            put(self.residents, name, HostBytes(flat, kind, 0))
            # The tensor is held, so that no other gets its identity.
            self._names[id(values)] = (name, values)
        return self._names[id(values)][0]

    def job(self, op: str, options: OpOptions, **inputs: HostBytes | torch.Tensor) -> BoundJob:
        """A job of these operands, bytes in the segment or residents, with results behind them."""
        return self._job(op, options, None, inputs)

    def storing_job(self, op: str, options: OpOptions, name: str, **inputs: HostBytes | torch.Tensor) -> BoundJob:
        """As `job`; its result stays on the device under a name."""
        return self._job(op, options, name, inputs)

    def _job(
        self, op: str, options: OpOptions, store: str | None, inputs: dict[str, HostBytes | torch.Tensor]
    ) -> BoundJob:
        residents = {name: self.resident(one) for name, one in inputs.items() if isinstance(one, torch.Tensor)}
        types = {
            name: one.type if isinstance(one, HostBytes) else TensorType(dtype_name(one.dtype), tuple(one.shape))
            for name, one in inputs.items()
        }
        hosts = {name: one for name, one in inputs.items() if isinstance(one, HostBytes)}
        fortran = [name for name, one in hosts.items() if one.fortran]
        template = template_of(op, options, types, residents, fortran=fortran, store=store, number=next(self._ids))
        outs = [self.place(one.type) for one in template.outputs if one.resident is None]
        offsets = tuple(one.offset for one in (*hosts.values(), *outs))
        job = bind(
            Job(template.id, template.id, offsets),
            plan_of(template, "cpu"),
            self.client,
            self.bindings,
            self.regions,
            0,
        )
        assert isinstance(job, BoundJob)
        return job

    def close(self) -> None:
        """Lets go of the segment."""
        self.client.mapped = None
