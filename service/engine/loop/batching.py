"""Which jobs may share a launch, and how their operands are joined. Pure: types and identities in, keys and shapes out.

    rows    matmul with the same resident `b`, softmax of equal N: rows concatenate into one taller operand
    flat    add of equal dtype and alpha: elements concatenate
    stack   small products of equal shape: one batched launch
    several small products of unequal shape: one staging each way, one grouped launch
    single  everything else

Knows no device, no clock and no scheduling.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping, Sequence

import msgspec
import torch

from tilewire.service.engine.backends.contract import HostBytes, Joined, Step
from tilewire.service.ipc.messages import Job
from tilewire.service.ops.registry import AddOptions, MatmulOptions, SoftmaxOptions

# Products below this share a launch whatever their shapes: alone, they would not fill a GPU.
SMALL_FLOPS = 2 * 512**3


class Form(enum.Enum):
    """How the operands of a batch are joined; see the module."""

    ROWS = "rows"
    FLAT = "flat"
    PRODUCTS = "products"


def key_of(job: Job, inputs: Mapping[str, HostBytes | torch.Tensor]) -> Hashable | None:
    """The batch key: jobs of equal keys may share a launch. None for a job that runs alone.

    Args:
        job: The job.
        inputs: Its inputs, residents resolved; a key holds the identity of a resident, so the inputs must outlive it.
    """
    options = job.options
    for source in inputs.values():
        if isinstance(source, HostBytes) and source.fortran:
            return None
    if isinstance(options, MatmulOptions):
        return _matmul_key(job, options, inputs)
    if isinstance(options, SoftmaxOptions):
        return _softmax_key(job, options, inputs)
    return _add_key(job, options, inputs)


def rows_of(job: Job) -> int:
    """Rows of the result: what the cap on a batch's rows counts."""
    return math.prod(job.out.shape[:-1])


def join(steps: Sequence[Step], key: Hashable | None) -> list[Joined]:
    """Works out the launches of a batch.

    Args:
        steps: Of equal keys, in the order of their results.
        key: Their key.
    """
    form = key[0] if isinstance(key, tuple) and len(steps) > 1 else None
    if form is Form.ROWS:
        return [_join_rows(steps)]
    if form is Form.FLAT:
        return [_join_flat(steps)]
    if form is Form.PRODUCTS and len({(_shape(step, "a"), _shape(step, "b")) for step in steps}) == 1:
        return [_join_stack(steps)]
    return [_alone(step) for step in steps]


def _matmul_key(job: Job, options: MatmulOptions, inputs: Mapping[str, HostBytes | torch.Tensor]) -> Hashable | None:
    a, b = inputs["a"], inputs["b"]
    if not isinstance(a, HostBytes) or 0 in a.type.shape:
        return None
    if isinstance(b, torch.Tensor):
        ids = _ids_of_extras(inputs) if len(inputs) > 2 else ()
        if options.transpose_a or b.dim() != 2 or ids is None:
            return None
        return (Form.ROWS, options, a.type.dtype, a.type.shape[-1], job.out.dtype, id(b), ids)
    is_plain = len(inputs) == len(a.type.shape) == len(b.type.shape) == 2
    if is_plain and b.type.num_elements and job.flops <= SMALL_FLOPS:
        return (Form.PRODUCTS, options, a.type.dtype, job.out.dtype)
    return None


def _ids_of_extras(inputs: Mapping[str, HostBytes | torch.Tensor]) -> Hashable | None:
    """The identities of bias and scales, or None when they are not shared."""
    extras = {name: source for name, source in inputs.items() if name not in ("a", "b")}
    # A scale for each row of `a` would have to be concatenated too; those jobs run alone.
    if "a_scale" in extras or not all(isinstance(extra, torch.Tensor) for extra in extras.values()):
        return None
    return tuple(sorted((name, id(extra)) for name, extra in extras.items()))


def _softmax_key(job: Job, options: SoftmaxOptions, inputs: Mapping[str, HostBytes | torch.Tensor]) -> Hashable | None:
    x = inputs["x"]
    if not isinstance(x, HostBytes) or options.axis not in (-1, len(x.type.shape) - 1) or not x.type.num_elements:
        return None
    return (Form.ROWS, options.log, x.type.dtype, x.type.shape[-1], job.out.dtype)


def _add_key(job: Job, options: AddOptions, inputs: Mapping[str, HostBytes | torch.Tensor]) -> Hashable | None:
    a, b = inputs["a"], inputs["b"]
    if not isinstance(a, HostBytes) or not isinstance(b, HostBytes):
        return None
    if a.type.shape != b.type.shape or not a.type.num_elements:
        return None
    # 1 and 1.0 are equal but not the same option: the type keeps integer jobs apart.
    return (Form.FLAT, type(options.alpha), options.alpha, a.type.dtype, job.out.dtype)


def _join_rows(steps: Sequence[Step]) -> Joined:
    first = steps[0]
    name = "a" if "a" in first.inputs else "x"
    sources = [_host(step, name) for step in steps]
    width = sources[0].type.shape[-1]
    rows = sum(source.type.num_elements // width for source in sources)
    shared = {key: source for key, source in first.inputs.items() if isinstance(source, torch.Tensor)}
    options = first.options
    if isinstance(options, SoftmaxOptions):
        options = msgspec.structs.replace(options, axis=-1)
    outs = [step.out for step in steps]
    return Joined(options, {name: (sources, (rows, width))}, shared, (rows, outs[0].type.shape[-1]), outs)


def _join_flat(steps: Sequence[Step]) -> Joined:
    gathered = {}
    for name in ("a", "b"):
        sources = [_host(step, name) for step in steps]
        gathered[name] = (sources, (sum(source.type.num_elements for source in sources),))
    return Joined(steps[0].options, gathered, {}, gathered["a"][1], [step.out for step in steps])


def _join_stack(steps: Sequence[Step]) -> Joined:
    gathered = {
        name: ([_host(step, name) for step in steps], (len(steps), *_shape(steps[0], name))) for name in ("a", "b")
    }
    outs = [step.out for step in steps]
    return Joined(steps[0].options, gathered, {}, (len(steps), *outs[0].type.shape), outs)


def _alone(step: Step) -> Joined:
    gathered = {
        name: ([source], source.type.shape) for name, source in step.inputs.items() if isinstance(source, HostBytes)
    }
    shared = {name: source for name, source in step.inputs.items() if isinstance(source, torch.Tensor)}
    return Joined(step.options, gathered, shared, step.out.type.shape, [step.out])


def _host(step: Step, name: str) -> HostBytes:
    source = step.inputs[name]
    assert isinstance(source, HostBytes), "This is a bug: the key let a resident through."
    return source


def _shape(step: Step, name: str) -> tuple[int, ...]:
    return _host(step, name).type.shape
