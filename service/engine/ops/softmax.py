"""Softmax: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results
from tilewire.service.ops.softmax import SoftmaxOptions

# Longest axis that torch sums in float32 on the CPU within the documented error: it adds up in few lanes.
MAX_FLOAT32_SIZE = 128


class EngineSoftmax(EngineOp[SoftmaxOptions]):
    """Softmax and log-softmax on the CPU and on the GPU."""

    pads_rows = True

    def cpu(self, inputs: Operands, options: SoftmaxOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        x, run = inputs["x"], torch.log_softmax if options.log else torch.softmax
        wide = torch.float32 if x.shape[options.axis] <= MAX_FLOAT32_SIZE else torch.float64
        return (run(x, options.axis, dtype=wide),)

    def gpu(self, call: KernelCall[SoftmaxOptions]) -> None:
        kernels, inputs, options, (out,), batch_invariant = call
        axis, log = options.axis, options.log
        kernels.softmax(inputs["x"], axis=axis, log=log, out_dtype=out.dtype, batch_invariant=batch_invariant, out=out)

    def prepare(self, call: KernelCall[SoftmaxOptions]) -> Compute:
        kernels, inputs, options, (out,), batch_invariant = call
        softmax = kernels.prepare_softmax(
            inputs["x"], out, axis=options.axis, log=options.log, batch_invariant=batch_invariant
        )
        return lambda given: softmax(given["x"], out)
