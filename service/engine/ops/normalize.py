"""Normalisation: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results
from tilewire.service.ops.normalize import DEFAULT_EPS, NormalizeOptions


class EngineNormalize(EngineOp[NormalizeOptions]):
    """Normalisation on the CPU and on the GPU."""

    def cpu(self, inputs: Operands, options: NormalizeOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        assert options.kind is not None, "This is a bug: planned without a kind."
        eps = DEFAULT_EPS[options.kind] if options.eps is None else options.eps
        # In C order, as a batch has it: sums depend on strides.
        x = inputs["x"].contiguous().float().movedim(options.axis, -1)
        if options.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        if options.kind == "l2":
            # The smallest norm is a tensor: as a number, one past float32 would be refused.
            out = x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=torch.tensor(eps))
        else:
            out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        if (weight := inputs.get("weight")) is not None:
            out = out * weight.float()
        if (bias := inputs.get("bias")) is not None:
            out = out + bias.float()
        return (out.movedim(-1, options.axis),)

    def prepare(self, call: KernelCall[NormalizeOptions]) -> Compute:
        """Binds a launch. A row does not depend on the others of its batch."""
        kernels, inputs, options, (out,), _ = call
        normalize = kernels.prepare_normalize(
            inputs["x"],
            out,
            kind=options.kind,
            weight=inputs.get("weight"),
            bias=inputs.get("bias"),
            axis=options.axis,
            eps=options.eps,
        )
        return lambda given: normalize(given["x"], given.get("weight"), given.get("bias"), out)
