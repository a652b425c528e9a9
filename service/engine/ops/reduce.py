"""Reductions: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results
from tilewire.service.ops.reduce import ReduceOptions

# Of float32 tensors, along the last dimension. Both libraries give the first index among equals, and NaN or its index; NumPy's
# takes a tenth of the time. Torch's sums are in blocks; its norms are not, and lose digits of long rows.
REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
    "argmax": lambda x: torch.from_numpy(np.asarray(x.numpy().argmax(-1))),
    "argmin": lambda x: torch.from_numpy(np.asarray(x.numpy().argmin(-1))),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.square().sum(-1).sqrt(),
}


class EngineReduce(EngineOp[ReduceOptions]):
    """Reductions on the CPU and on the GPU."""

    def cpu(self, inputs: Operands, options: ReduceOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        assert options.kind is not None, "This is a bug: planned without a kind."
        # In C order, as a batch has it: sums depend on strides.
        x = inputs["x"].contiguous().float()
        if isinstance(options.axis, str):
            out = REDUCTIONS[options.kind](x.reshape(-1))
            return (out.reshape((1,) * x.dim()) if options.keepdims else out,)
        out = REDUCTIONS[options.kind](x.movedim(options.axis, -1))
        return (out.unsqueeze(options.axis) if options.keepdims else out,)

    def prepare(self, call: KernelCall[ReduceOptions]) -> Compute:
        kernels, inputs, options, (out,), batch_invariant = call
        axis = None if isinstance(options.axis, str) else options.axis
        reduce = kernels.prepare_reduce(inputs["x"], out, kind=options.kind, axis=axis, batch_invariant=batch_invariant)
        return lambda given: reduce(given["x"], out)
