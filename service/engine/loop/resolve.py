"""From a gateway's template and jobs to operands: where each lies, and that it lies inside.

A template is resolved once into a `JobPlan`; a job of it only binds offsets, and residents by their generation. Runs in the
engine's loop thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewire.service.engine.backends.contract import DevicePlace, HostBytes, extent_of
from tilewire.service.engine.loop.cost_estimate import predict_s
from tilewire.service.engine.loop.jobs import Binding, BoundJob, Client, JobPlan, Span
from tilewire.service.engine.tensors.resident import Resident
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions, Use, Uses
from tilewire.service.ipc.messages import InputSpec, Job, Stale, Template, Upload
from tilewire.service.ops.op import AnyOp, Batching, JoinStrategy, TensorType
from tilewire.service.ops.registry import op_for, program_of


def plan_of(template: Template, backend: str) -> JobPlan:
    """Resolves a template as far as no resident is needed; the backend, `gpu` or `cpu`, is for the cost estimate.

    Raises:
        UnknownName: No such op.
    """
    op, options = op_for(template.op, template.options), template.options
    inputs = tuple(
        Span(one.name, one.type, one.type.nbytes, one.type.nbytes, one.fortran, one.region)
        for one in template.inputs
        if one.resident is None
    )
    residents = tuple((one.resident, one) for one in template.inputs if one.resident is not None)
    outputs = tuple(
        Span(name, one.type, one.type.nbytes, extent_of(one.type, one.pitch), region=one.region, pitch=one.pitch)
        for name, one in zip(op.outputs, template.outputs, strict=True)
        if one.resident is None
    )
    kept = next(((one.resident, one.type, one.durable) for one in template.outputs if one.resident is not None), None)
    types = {one.name: one.type for one in template.inputs}
    out_types = [one.type for one in template.outputs]
    resident_inputs = frozenset(one.name for _, one in residents)
    batching = None
    if kept is None and not any(span.fortran for span in inputs):
        batching = op.batching(types, resident_inputs, options, out_types)
    host_bytes = sum(span.nbytes for span in (*inputs, *outputs))
    return JobPlan(
        template=template,
        op=op,
        inputs=inputs,
        residents=residents,
        outputs=outputs,
        kept=kept,
        batching=batching,
        row_shapes=_row_shapes(op, batching, inputs, types),
        rows=math.prod(out_types[0].shape[:-1]),
        host_bytes=host_bytes,
        seconds=predict_s(backend, template.flops, host_bytes),
        work=op.work(types, resident_inputs, options, template.flops, template.moved_bytes),
        program="".join(program_of(name) for name, _ in residents),
        has_regions=any(span.region is not None for span in (*inputs, *outputs)),
    )


def _row_shapes(
    op: AnyOp, batching: Batching[Any] | None, inputs: Sequence[Span], types: dict[str, TensorType]
) -> tuple[tuple[int, ...], ...]:
    if batching is None or batching.strategy is not JoinStrategy.ROWS:
        return ()
    rows = {span.name: TensorType(span.type.dtype, (1, span.type.shape[-1])) for span in inputs}
    return tuple(out.shape for out in op.infer({**types, **rows}, batching.options)[0])


class Bindings:
    """The bindings of plans. A resident tensor that changes takes those with it that have it: none keeps it alive."""

    def __init__(self, residents: Residents) -> None:
        self.residents = residents
        self._by_plan: dict[JobPlan, Binding] = {}
        # Plans whose bindings have a tensor, by its name.
        self._plans: dict[str, set[JobPlan]] = {}
        residents.on_change = self._drop

    def find(self, job: Job, plan: JobPlan) -> Binding | Stale:
        """Returns the binding of a job's plan; the types of residents where they are not as planned.

        Raises:
            UnknownName: No such resident.
            Lost: A resident died with the engine that held it.
        """
        binding = self._by_plan.get(plan)
        return binding if binding is not None else self._make(job, plan)

    def forget(self, plan: JobPlan) -> None:
        """Drops the binding of a plan."""
        if self._by_plan.pop(plan, None) is not None:
            for name in {name for name, _ in plan.residents}:
                self._plans[name].remove(plan)
                if not self._plans[name]:
                    del self._plans[name]

    def _drop(self, name: str) -> None:
        for plan in tuple(self._plans.get(name, ())):
            self.forget(plan)

    def _make(self, job: Job, plan: JobPlan) -> Binding | Stale:
        residents = self.residents
        missing = tuple(name for name, _ in plan.residents if residents.at(name) is None)
        if residents.has_store and missing:
            return Stale(job.id, (), missing)
        found = [residents.get(name, field=one.name) for name, one in plan.residents]
        tensors = {}
        for (_, one), resident in zip(plan.residents, found, strict=True):
            if _tensor_for(one, resident) is None:
                return _stale(job, plan, found, residents)
            residents.lay_out(resident, plan.op, one.name, plan.template.options)
            tensor = _tensor_for(one, resident)
            assert tensor is not None, "This is a bug."
            tensors[one.name] = tensor
        binding = self._by_plan[plan] = _binding(plan, found, tensors)
        for name, _ in plan.residents:
            self._plans.setdefault(name, set()).add(plan)
        return binding


def bind(
    job: Job, plan: JobPlan, client: Client, bindings: Bindings, regions: Regions, now_ns: int
) -> BoundJob | Stale:
    """Resolves a job's operands as they are now; it finishes with them, even if they are replaced or unregistered meanwhile.

    Returns:
        The job, whose regions are in use until they are released; or the types of residents that have changed.

    Raises:
        UnknownName: No such resident or region.
        InvalidRequest: A tensor does not lie inside its region.
        Lost: A resident died with the engine that held it.
        ResidentQuota: There is no room for a result that stays.
    """
    binding = bindings.find(job, plan)
    if isinstance(binding, Stale):
        return binding
    if plan.kept is not None:
        bindings.residents.check_room(plan.kept[0], plan.kept[1].nbytes)
    uses = _find_regions(plan, job.offsets, regions) if plan.has_regions else {}
    inputs: dict[str, HostBytes | torch.Tensor] = {**binding.tensors}
    outs = _host_operands(plan, job.offsets, client, uses, inputs)
    for resident in binding.residents:
        bindings.residents.use(resident)
    if uses:
        regions.hold(uses)
    return BoundJob(
        binding.key,
        now_ns,
        job.deadline_ns,
        job.priority,
        plan.rows,
        plan.host_bytes,
        plan.seconds,
        job.flow,
        job.weight,
        client=client,
        job=job,
        plan=plan,
        inputs=inputs,
        outs=outs,
        signature=binding.signature,
        uses=uses,
        kept=None if plan.kept is None else DevicePlace(plan.kept[1]),
    )


def _tensor_for(one: InputSpec, resident: Resident) -> torch.Tensor | None:
    """Returns the tensor of an input; None when the resident is not as the gateway planned, or not on this device."""
    info = resident.info
    if one.version not in (None, info.tag):
        return None
    tensor = resident.tensor_of(one.part)
    is_right = info.type == one.type if one.part is None else one.part.type_of(info.type) == one.type
    return tensor if is_right else None


def _host_operands(
    plan: JobPlan,
    offsets: Sequence[int],
    client: Client,
    uses: Uses,
    inputs: dict[str, HostBytes | torch.Tensor],
) -> list[HostBytes]:
    """Adds the inputs on the host, in the gateway's segment or in clients' regions; returns the places of outputs."""
    mapped, segment_bytes = client.mapped, client.segment.nbytes
    assert mapped is not None, "This is a bug."
    assert len(offsets) == len(plan.inputs) + len(plan.outputs), "This is a bug: not the template's offsets."
    outs: list[HostBytes] = []
    # Counted by hand: `zip` would take longer than all the rest.
    at = 0
    for name, kind, _, extent, fortran, _, _ in plan.inputs:
        offset = offsets[at]
        at += 1
        if name in uses:
            inputs[name] = uses[name].place()
            continue
        assert 0 <= offset <= segment_bytes - extent, "This is a bug: an operand outside its segment."
        inputs[name] = HostBytes(mapped, kind, offset, fortran)
    for name, kind, _, extent, _, _, pitch in plan.outputs:
        offset = offsets[at]
        at += 1
        if name in uses:
            outs.append(uses[name].place())
            continue
        assert 0 <= offset <= segment_bytes - extent, "This is a bug: a result outside its segment."
        outs.append(HostBytes(mapped, kind, offset, pitch=pitch))
    return outs


def _stale(job: Job, plan: JobPlan, found: Sequence[Resident], residents: Residents) -> Stale:
    infos = [
        residents.info(name)
        for (name, one), resident in zip(plan.residents, found, strict=True)
        if _tensor_for(one, resident) is None
    ]
    return Stale(job.id, tuple(infos))


def _binding(plan: JobPlan, found: Sequence[Resident], tensors: Mapping[str, torch.Tensor]) -> Binding:
    template, batching = plan.template, plan.batching
    generations = tuple(resident.generation for resident in found)
    own = tuple((one.name, one.part, at) for (_, one), at in zip(plan.residents, generations, strict=True))
    # Not the strategy itself: an enum's hash takes longer than all the rest.
    key = None if batching is None else (template.op, batching.strategy.value, batching.key, own)
    sources = tuple((span.name, span.type, span.fortran) for span in plan.inputs)
    outs = tuple((one.type, one.pitch) for one in template.outputs)
    signature = (template.op, template.options.key, sources, own, outs)
    return Binding(found, tensors, key, signature)


def _find_regions(plan: JobPlan, offsets: Sequence[int], regions: Regions) -> dict[str, Use]:
    """Finds what lies in regions."""
    uses: dict[str, Use] = {}
    num_inputs = len(plan.inputs)
    for number, (span, offset) in enumerate(zip((*plan.inputs, *plan.outputs), offsets, strict=True)):
        if span.region is not None:
            is_out = number >= num_inputs
            uses[span.name] = regions.find(span.region, offset, span.type, field=span.name, is_out=is_out)
    return uses


def stage_in(job: BoundJob, regions: Regions) -> None:
    """Copies inputs in regions that the device does not reach by itself.

    Raises:
        InvalidRequest: The shared memory was cut.
    """
    buffers = regions.stage_in(job.uses)
    job.inputs |= {name: buffer for name, buffer in buffers.items() if not job.uses[name].is_out}
    job.outs = [buffers.get(span.name, out) for span, out in zip(job.plan.outputs, job.outs, strict=True)]


def stage_out(job: BoundJob) -> None:
    """Copies results into regions that the device does not reach by itself.

    Raises:
        InvalidRequest: The shared memory was cut.
    """
    for span, out in zip(job.plan.outputs, job.outs, strict=True):
        if span.name in job.uses:
            job.uses[span.name].stage_out(out)


def in_segment(client: Client, source: Upload) -> HostBytes:
    """Finds a tensor in a gateway's segment; gateways are ours, but memory is not trusted to them."""
    assert client.mapped is not None, "This is a bug."
    is_inside = 0 <= source.offset <= source.offset + source.type.nbytes <= client.segment.nbytes
    assert is_inside, "This is a bug: an operand outside its segment."
    return HostBytes(client.mapped, source.type, source.offset, source.fortran)
