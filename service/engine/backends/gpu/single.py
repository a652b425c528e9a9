"""The general launch plan: copies in, kernels and copies out on a stream each, with memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewire import kernels
from tilewire.service.engine.backends.contract import LaunchSpec
from tilewire.service.engine.backends.gpu.pipeline import InFlight, Pipeline
from tilewire.service.engine.backends.gpu.staging import Staging
from tilewire.service.engine.backends.host import TORCH_DTYPES
from tilewire.service.engine.ops.op import KernelCall, Operands
from tilewire.service.engine.ops.registry import ENGINE_OPS


class Single:
    """Runs any batch."""

    def __init__(self, staging: Staging, *, is_invariant: bool) -> None:
        self._staging = staging
        self._is_invariant = is_invariant

    def run(self, launches: Sequence[LaunchSpec], pipeline: Pipeline) -> InFlight:
        """Queues copies and kernels of a batch."""
        marks, held = pipeline.marks(), list[torch.Tensor]()
        marks.begin.record(pipeline.stage_in)
        pipeline.use(pipeline.stage_in)
        staged = self._stage(launches, held)
        marks.staged.record(pipeline.stage_in)
        pipeline.compute.wait_event(marks.staged)
        pipeline.use(pipeline.compute)
        can_pad = ENGINE_OPS[launches[0].op.name].pads_rows
        outs = [empty_outputs(launch, self._staging, can_pad=can_pad) for launch in launches]
        self._compute(launches, staged, outs)
        marks.computed.record(pipeline.compute)
        pipeline.stage_out.wait_event(marks.computed)
        pipeline.use(pipeline.stage_out)
        if (kept := launches[0].kept) is not None:
            # The memory that the kernel wrote becomes the resident.
            (kept.tensor,) = outs[0]
            held += outs[0]
        else:
            results = [
                (result, places)
                for launch, given in zip(launches, outs, strict=True)
                for result, (places, _) in zip(given, launch.outputs, strict=True)
            ]
            self._staging.scatter(results, held)
        marks.end.record(pipeline.stage_out)
        return InFlight(marks, held, pipeline)

    def _stage(self, launches: Sequence[LaunchSpec], held: list[torch.Tensor]) -> list[Operands]:
        operands = [operand for one in launches for operand in one.concatenated.values()]
        can_pad = ENGINE_OPS[launches[0].op.name].pads_rows
        wholes = iter(self._staging.gather(operands, held, can_pad=can_pad) if operands else ())
        staged = []
        for one in launches:
            held += one.resident.values()
            staged.append(Operands({name: next(wholes) for name in one.concatenated}, one.resident))
        return staged

    def _compute(
        self,
        launches: Sequence[LaunchSpec],
        staged: Sequence[Operands],
        outs: Sequence[list[torch.Tensor]],
    ) -> None:
        op, options = ENGINE_OPS[launches[0].op.name], launches[0].options
        if len(launches) > 1 and not self._is_invariant:
            # An op that sums differently than a launch of its own is not for requests that need the same bits.
            op.gpu_many(kernels, staged, options, outs)
            return
        for operands, results in zip(staged, outs, strict=True):
            op.gpu(KernelCall(kernels, operands, options, results, self._is_invariant))


def empty_outputs(launch: LaunchSpec, staging: Staging, *, can_pad: bool) -> list[torch.Tensor]:
    """Takes memory for the results of a launch, on the current stream; rows are padded only if `can_pad`."""
    return [staging.empty(shape, TORCH_DTYPES[kind.dtype], can_pad=can_pad) for kind, shape in launch.results()]
