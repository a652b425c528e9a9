"""Softmax: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewire.service.engine.ops.op import Compute, EngineOp, Operands
from tilewire.service.ops.softmax import SoftmaxOptions


class EngineSoftmax(EngineOp[SoftmaxOptions]):
    """Softmax and log-softmax on the CPU and on the GPU."""

    name = "softmax"

    def cpu(
        self, inputs: Operands, options: SoftmaxOptions, out_dtypes: Sequence[torch.dtype]
    ) -> tuple[torch.Tensor, ...]:
        """Computes on the host with torch."""
        del out_dtypes
        run = torch.log_softmax if options.log else torch.softmax
        return (run(inputs["x"], options.axis, dtype=torch.float32),)

    def gpu(
        self,
        kernels: Any,
        inputs: Operands,
        options: SoftmaxOptions,
        outs: Sequence[torch.Tensor],
        *,
        batch_invariant: bool,
    ) -> None:
        """Launches on the current stream."""
        (out,) = outs
        axis, log = options.axis, options.log
        kernels.softmax(inputs["x"], axis=axis, log=log, out_dtype=out.dtype, batch_invariant=batch_invariant, out=out)

    def prepare(
        self,
        kernels: Any,
        inputs: Operands,
        options: SoftmaxOptions,
        outs: Sequence[torch.Tensor],
        *,
        batch_invariant: bool,
    ) -> Compute:
        """Binds a launch to everything but the addresses of its inputs."""
        (out,) = outs
        softmax = kernels.prepare_softmax(
            inputs["x"], out, axis=options.axis, log=options.log, batch_invariant=batch_invariant
        )
        return lambda given: softmax(given["x"], out)
