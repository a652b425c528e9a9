"""Scaled sums: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results
from tilewire.service.ops.add import AddOptions


class EngineAdd(EngineOp[AddOptions]):
    """Scaled sums on the CPU and on the GPU."""

    def cpu(self, inputs: Operands, options: AddOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        a, b, (out_dtype,) = inputs["a"], inputs["b"], out_dtypes
        if a.dtype.is_floating_point:
            wide = torch.promote_types(torch.promote_types(a.dtype, out_dtype), torch.float32)
            # As a tensor's element, a number past the range is infinite.
            factor = torch.tensor(options.alpha, dtype=wide).item()
            if factor not in (1, -1):
                # Products of float32 numbers are exact there. What rounding takes from one may be all of a small sum.
                wide = torch.float64
            return (torch.add(a.to(wide), b.to(wide), alpha=factor),)
        # Integers wrap as NumPy's do, whatever alpha is.
        alpha = torch.tensor(options.alpha, dtype=torch.int64).to(a.dtype)
        return (a + b * alpha,)

    def gpu(self, call: KernelCall[AddOptions]) -> None:
        """Launches the kernel. A sum does not depend on the others of its batch."""
        kernels, inputs, options, (out,), _ = call
        kernels.add(inputs["a"], inputs["b"], alpha=options.alpha, out_dtype=out.dtype, out=out)

    def prepare(self, call: KernelCall[AddOptions]) -> Compute:
        kernels, inputs, options, (out,), _ = call
        add = kernels.prepare_add(inputs["a"], inputs["b"], out, alpha=options.alpha)
        return lambda given: add(given["a"], given["b"], out)
