"""Programs: every step in turn on the same device, with the values between the steps in one workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from tilewire.service.engine.backends.host import TORCH_DTYPES, dtype_name
from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results, Summed
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.program.op import ProgramFamily, ProgramOptions
from tilewire.service.ops.program.planning import PlannedProgram

# The op of a step, its call, and the value, program input or `@resident` for each input of the op.
_Step: TypeAlias = tuple[EngineOp[Any], KernelCall[Any], Mapping[str, str]]


class EngineProgram(EngineOp[ProgramOptions]):
    """Runs the steps of a program; see `service.ops.program`."""

    takes_steps = True

    def __init__(self, family: ProgramFamily, ops: Mapping[str, EngineOp[Any]]) -> None:
        self._family = family
        self._ops = ops

    def cpu(self, inputs: Operands, options: ProgramOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        """Computes step by step; a value is freed after its last reader."""
        planned = self._plan(inputs, options)
        values = dict(inputs)
        last = {source: number for number, one in enumerate(planned.steps) for source in one.step.inputs.values()}
        answered = self._family.bound(options).outputs
        for number, one in enumerate(planned.steps):
            given = _operands(one.step.inputs, values, inputs.resident)
            outs = [(TORCH_DTYPES[out.dtype], out.shape) for out in one.plan.outputs]
            results = self._ops[one.step.op.name].on_host(given, one.step.options, outs)
            for name, result, (dtype, _) in zip(one.step.outputs, results, outs, strict=True):
                # In C order, as a request of its own would have it: sums depend on strides.
                values[name] = result.to(dtype).contiguous()
            for source in one.step.inputs.values():
                if last[source] == number and source not in answered:
                    values.pop(source, None)
        return tuple(values[name] for name in answered)

    def gpu(self, call: KernelCall[ProgramOptions]) -> None:
        """Launches the steps back to back."""
        for op, step, _ in self._steps(call)[1]:
            op.gpu(step)

    def prepare(self, call: KernelCall[ProgramOptions]) -> Compute:
        """Prepares every step over one workspace, which the returned launch holds."""
        values, steps = self._steps(call)
        prepared = [(op.prepare(step), sources) for op, step, sources in steps]

        def run(given: Operands) -> None:
            current = {**values, **given}
            for launch, sources in prepared:
                launch(_operands(sources, current, given.resident))

        return run

    def summed(self, name: str, options: ProgramOptions) -> Summed | None:
        """See `EngineOp`: as the first step does that sums products of the input."""
        for step in self._family.bound(options).program.steps:
            for field, source in step.inputs.items():
                if source == name and (summed := self._ops[step.op.name].summed(field, step.options)) is not None:
                    return summed
        return None

    def _steps(self, call: KernelCall[ProgramOptions]) -> tuple[dict[str, torch.Tensor], list[_Step]]:
        """Returns the tensors of all values, and each step as the call of an op on them."""
        kernels, inputs, options, outs, batch_invariant = call
        planned = self._plan(inputs, options)
        values = self._place(planned, inputs, options, outs)
        steps: list[_Step] = []
        for step in (one.step for one in planned.steps):
            given = _operands(step.inputs, values, inputs.resident)
            results = [values[name] for name in step.outputs]
            step_call = KernelCall(kernels, given, step.options, results, batch_invariant)
            steps.append((self._ops[step.op.name], step_call, step.inputs))
        return values, steps

    def _plan(self, inputs: Operands, options: ProgramOptions) -> PlannedProgram:
        types = {name: TensorType(dtype_name(one.dtype), tuple(one.shape)) for name, one in inputs.items()}
        return self._family.bound(options).plan(types)

    def _place(
        self, planned: PlannedProgram, inputs: Operands, options: ProgramOptions, outs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns a tensor for every value; those between the steps are views of one workspace."""
        values = {**inputs, **dict(zip(self._family.bound(options).outputs, outs, strict=True))}
        device = outs[0].device
        workspace = torch.empty(planned.workspace_bytes, dtype=torch.uint8, device=device)
        for name, offset in planned.offsets.items():
            kind = planned.values[name]
            flat = workspace[offset : offset + kind.nbytes].view(TORCH_DTYPES[kind.dtype])
            values[name] = flat.view(kind.shape)
        return values


def _operands(
    sources: Mapping[str, str], values: Mapping[str, torch.Tensor], resident: Mapping[str, torch.Tensor]
) -> Operands:
    """Returns the operands of a step, by input of its op."""
    kept = {field: resident[source] for field, source in sources.items() if source in resident}
    return Operands({field: values[source] for field, source in sources.items() if field not in kept}, kept)
