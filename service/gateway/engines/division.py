"""Divides a request on sharded residents into a job for each engine. Pure: types in, templates out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.engines.templates import Outputs, Templates
from tilewire.service.ipc.messages import InputSpec, OutputSpec, Template, TensorInfo
from tilewire.service.ops.merge import MERGE, MergeOptions
from tilewire.service.ops.op import AnyOp, OpOptions, Sharding, TensorType
from tilewire.service.ops.registry import op_for
from tilewire.service.placement import Part, part_of


class PartJob(NamedTuple):
    """The job of one engine.

    Attributes:
        template: Template of the job.
        shifts: Addends to the offset of each input that is no resident: an engine reads its own part.
        begins: Offset of its first byte in each output.
    """

    template: Template
    shifts: tuple[int, ...]
    begins: tuple[int, ...]


class Division(NamedTuple):
    """A request, divided.

    Attributes:
        field: Input that is sharded.
        jobs: Job of each engine.
        outputs: Dtypes and shapes of the outputs that all jobs write together.
        merge: Template that makes the request's outputs of those; None where they are the request's.
    """

    field: str
    jobs: Sequence[PartJob]
    outputs: Sequence[TensorType]
    merge: Template | None


def divide(template: Template, infos: Mapping[str, TensorInfo], count: int, templates: Templates) -> Division:
    """Divides the jobs of a template among `count` engines; `infos` describe its residents, by input.

    Raises:
        InvalidRequest: The op does not take a part of a resident.
    """
    types = {spec.name: spec.type for spec in template.inputs}
    op = op_for(template.op, template.options)
    sharding = check_sharding(op, op.sharding(types, template.options), infos)
    if sharding.selection is None and any(one.region is not None for one in template.outputs):
        raise InvalidRequest(f"{op.outputs[0]}: shared memory takes no result of a sharded {sharding.field}")
    parts = [part_of(types[sharding.field], sharding.axes[sharding.field], index, count) for index in range(count)]
    inputs = [[_input_of(spec, sharding, infos, part) for spec in template.inputs] for part in parts]
    options = [_options_of(template.options, sharding, part) for part in parts]
    planned = [
        op.infer({spec.name: spec.type for spec, _ in own}, option) for own, option in zip(inputs, options, strict=True)
    ]
    widths = [outputs[0].shape[-1] for outputs, _ in planned]
    wholes = [TensorType(one.dtype, (*one.shape[:-1], sum(widths))) for one in planned[0][0]]
    begins = itertools.accumulate(widths, initial=0)
    jobs = []
    for own, option, (outputs, flops), begin in zip(inputs, options, planned, begins, strict=False):
        specs = tuple(spec for spec, _ in own)
        outs = tuple(OutputSpec(one, pitch=_row_bytes(one.dtype, sum(widths))) for one in outputs)
        nbytes = sum(spec.type.nbytes for spec in specs) + sum(one.nbytes for one in outputs)
        job = templates.find(template.op, specs, option, outs, partial(Outputs, outs, flops, nbytes))
        shifts = tuple(shift for spec, shift in own if spec.resident is None)
        jobs.append(PartJob(job, shifts, tuple(_row_bytes(one.dtype, begin) for one in outputs)))
    merge = None
    if (selection := sharding.selection) is not None:
        candidates = tuple((width, part.begin) for width, part in zip(widths, parts, strict=True))
        merge = templates.find(
            MERGE,
            tuple(InputSpec(name, one) for name, one in zip(op.outputs, wholes, strict=True)),
            MergeOptions(selection.k, selection.largest, selection.is_nan_large, candidates),
            template.outputs,
            partial(Outputs, template.outputs, 0, sum(one.nbytes for one in wholes)),
        )
    return Division(sharding.field, jobs, wholes, merge)


def check_sharding(op: AnyOp, sharding: Sharding | None, infos: Mapping[str, TensorInfo]) -> Sharding:
    """Returns the division of a request; refuses one that needs more of a sharded resident than its parts.

    Returns:
        The division.

    Raises:
        InvalidRequest: The detail names the input.
    """
    for field, info in infos.items():
        if not info.axis:
            continue
        if sharding is None or field not in sharding.axes:
            raise InvalidRequest(f"{op.place_of(field)}: {info.name!r} is sharded, and {op.name} needs it whole")
        if sharding.axes[field] != info.axis:
            raise InvalidRequest(
                f"{field}: {info.name!r} is sharded along axis {info.axis}; {op.name} needs axis={sharding.axes[field]} here"
            )
        if not (sharding.field in infos and infos[sharding.field].axis):
            raise InvalidRequest(f"{field}: {info.name!r} is sharded, but {sharding.field} is not")
    assert sharding is not None, "This is a bug: nothing is sharded."
    return sharding


def _input_of(
    spec: InputSpec, sharding: Sharding, infos: Mapping[str, TensorInfo], part: Part
) -> tuple[InputSpec, int]:
    """Returns an input of one engine, and what is added to its offset."""
    axis, kind, shift, cut = sharding.axes.get(spec.name), spec.type, 0, None
    if axis is not None:
        cut = Part(axis, part.begin, part.end)
        kind, shift = cut.type_of(spec.type), cut.offset_in(spec.type)
    if spec.resident is None:
        # An operand that is cut in a body has one row: its part is in one piece.
        return msgspec.structs.replace(spec, type=kind), shift
    return msgspec.structs.replace(spec, type=kind, version=infos[spec.name].tag, part=cut), 0


def _options_of(options: OpOptions, sharding: Sharding, part: Part) -> OpOptions:
    """Returns the options of one engine: no more elements are chosen of a part than it has."""
    if sharding.selection is None:
        return options
    return msgspec.structs.replace(options, k=min(sharding.selection.k, part.end - part.begin))


def _row_bytes(dtype: str, width: int) -> int:
    return TensorType(dtype, (width,)).nbytes
