"""Functions of each element: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tilewire.service.engine.ops.matmul import ACTIVATIONS
from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results
from tilewire.service.ops.pointwise import PointwiseOptions

FUNCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in ("mul", "sub", "div", "maximum", "minimum", "exp", "log", "sqrt", "rsqrt", "abs", "neg")
    },
    **ACTIVATIONS,
}


class EnginePointwise(EngineOp[PointwiseOptions]):
    """Functions of each element on the CPU and on the GPU."""

    def cpu(self, inputs: Operands, options: PointwiseOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        assert options.fn is not None, "This is a bug: planned without a function."
        operands = [inputs[name].float() for name in ("x", "y") if name in inputs]
        out = FUNCTIONS[options.fn](*operands)
        if options.scale != 1:
            out = out * options.scale
        return (out + options.shift if options.shift != 0 else out,)

    def prepare(self, call: KernelCall[PointwiseOptions]) -> Compute:
        """Binds a launch. An element does not depend on the others of its batch."""
        kernels, inputs, options, (out,), _ = call
        pointwise = kernels.prepare_pointwise(
            inputs["x"], out, fn=options.fn, y=inputs.get("y"), scale=options.scale, shift=options.shift
        )
        return lambda given: pointwise(given["x"], given.get("y"), out)
