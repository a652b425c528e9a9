"""The launches of a batch: how the operands of its jobs are joined. Pure: places in, shapes out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from tilewire.service.engine.backends.contract import HostBytes, LaunchSpec
from tilewire.service.engine.loop.jobs import BoundJob
from tilewire.service.ops.op import AnyOp, JoinStrategy, OpOptions


def join(jobs: Sequence[BoundJob]) -> list[LaunchSpec]:
    """Works out the launches of jobs of equal batch keys, in the order of their results; or of a single job."""
    first = jobs[0]
    batching = first.plan.batching
    if len(jobs) == 1 or batching is None:
        return [launch_alone(job) for job in jobs]
    is_uniform = _are_uniform(jobs)
    if batching.strategy is JoinStrategy.STACK and not is_uniform:
        return [launch_alone(job) for job in jobs]
    concatenated = {}
    total = 0
    for span in first.plan.inputs:
        pieces = [_host(job, span.name) for job in jobs]
        concatenated[span.name] = (pieces, shape := _joint_shape(batching.strategy, pieces, is_uniform=is_uniform))
        total = shape[0]
    outputs = []
    for number, out in enumerate(first.outs):
        if batching.strategy is JoinStrategy.ROWS:
            shape = (total, *first.plan.row_shapes[number][1:])
        else:
            shape = (total,) if batching.strategy is JoinStrategy.FLAT else (total, *out.type.shape)
        outputs.append(([job.outs[number] for job in jobs], shape))
    signature = (first.signature, "joint") if is_uniform else None
    resident = {name: source for name, source in first.inputs.items() if isinstance(source, torch.Tensor)}
    flops = sum([job.plan.template.flops for job in jobs])
    return [LaunchSpec(first.plan.op, batching.options, concatenated, resident, outputs, signature, flops)]


def launch_alone(job: BoundJob) -> LaunchSpec:
    """Returns the launch of one job."""
    template = job.plan.template
    signature = (job.signature, "alone")
    launch = launch_of(job.plan.op, template.options, job.inputs, job.outs, signature, template.flops)
    launch.kept = job.kept
    return launch


def launch_of(
    op: AnyOp,
    options: OpOptions,
    inputs: dict[str, HostBytes | torch.Tensor],
    outs: Sequence[HostBytes],
    signature: Hashable | None = None,
    flops: int = 0,
) -> LaunchSpec:
    """Returns a launch of operands as they are."""
    concatenated = {
        name: ([source], source.type.shape) for name, source in inputs.items() if isinstance(source, HostBytes)
    }
    resident = {name: source for name, source in inputs.items() if isinstance(source, torch.Tensor)}
    return LaunchSpec(op, options, concatenated, resident, [([out], out.type.shape) for out in outs], signature, flops)


def _are_uniform(jobs: Sequence[BoundJob]) -> bool:
    """Whether all jobs have the same types."""
    # Jobs of one plan have the same signature, and there are few plans.
    first, *others = {id(job.signature): job.signature for job in jobs}.values()
    return all(other == first for other in others)


def _joint_shape(strategy: JoinStrategy, pieces: Sequence[HostBytes], *, is_uniform: bool) -> tuple[int, ...]:
    first, count = pieces[0].type, len(pieces)
    shape = first.shape
    if strategy is JoinStrategy.STACK:
        return (count, *shape)
    total = first.num_elements * count if is_uniform else sum(piece.type.num_elements for piece in pieces)
    return (total,) if strategy is JoinStrategy.FLAT else (total // shape[-1], shape[-1])


def _host(job: BoundJob, name: str) -> HostBytes:
    source = job.inputs[name]
    assert isinstance(source, HostBytes), "This is a bug: the key let a resident through."
    return source
