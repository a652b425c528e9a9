"""Matrix products: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from tilewire.service.engine.ops.op import Compute, EngineOp, Epilogue, KernelCall, Operands, Results, Summed
from tilewire.service.ops.matmul import MatmulOptions

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.01),
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class EngineMatmul(EngineOp[MatmulOptions]):
    """Matrix products on the CPU and on the GPU."""

    pads_rows = True
    multiplies = True

    def cpu(self, inputs: Operands, options: MatmulOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        a, b, (out_dtype,) = inputs["a"], inputs["b"], out_dtypes
        # int8 products are exact in float64, whose matmul is fast; torch's own integer matmul is a plain loop.
        wide = torch.float64 if a.dtype == torch.int8 else torch.float32
        acc = torch.matmul(
            (a.mT if options.transpose_a else a).to(wide),
            (b.mT if options.transpose_b else b).to(wide),
        )
        if out_dtype == torch.int32:
            acc = acc.to(torch.int32)
        elif wide == torch.float64:
            acc = acc.to(torch.float32)
        if (a_scale := inputs.get("a_scale")) is not None:
            acc = acc * a_scale.reshape(-1, 1)
        if (b_scale := inputs.get("b_scale")) is not None:
            acc = acc * b_scale.reshape(1, -1)
        if (bias := inputs.get("bias")) is not None:
            acc = acc + bias.to(acc.dtype)
        return (ACTIVATIONS[options.activation](acc),)

    def gpu(self, call: KernelCall[MatmulOptions]) -> None:
        kernels, inputs, options, outs, batch_invariant = call
        kernels.matmul(
            inputs["a"],
            inputs["b"],
            bias=inputs.get("bias"),
            a_scale=inputs.get("a_scale"),
            b_scale=inputs.get("b_scale"),
            transpose_a=options.transpose_a,
            transpose_b=options.transpose_b,
            activation=options.activation,
            out_dtype=outs[0].dtype,
            precision=options.precision,
            batch_invariant=batch_invariant,
            out=outs[0],
        )

    def gpu_many(
        self, kernels: Any, inputs: Sequence[Operands], options: MatmulOptions, outs: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        results = [out for (out,) in outs]
        kernels.grouped_matmul(
            [one["a"].mT.contiguous() if options.transpose_a else one["a"] for one in inputs],
            [one["b"].mT if options.transpose_b else one["b"] for one in inputs],
            activation=options.activation,
            out_dtype=results[0].dtype,
            precision=options.precision,
            out=results,
        )

    def prepare(self, call: KernelCall[MatmulOptions]) -> Compute:
        kernels, inputs, options, (out,), batch_invariant = call
        matmul = kernels.prepare_matmul(
            inputs["a"].mT if options.transpose_a else inputs["a"],
            inputs["b"].mT if options.transpose_b else inputs["b"],
            out,
            bias=inputs.get("bias"),
            a_scale=inputs.get("a_scale"),
            b_scale=inputs.get("b_scale"),
            activation=options.activation,
            precision=options.precision,
            batch_invariant=batch_invariant,
        )
        # A launch takes addresses, which a transposed view shares with what it shows.
        return lambda given: matmul(
            given["a"], given["b"], out, given.get("bias"), given.get("a_scale"), given.get("b_scale")
        )

    def summed(self, name: str, options: MatmulOptions) -> Summed | None:
        axes = {"a": -2 if options.transpose_a else -1, "b": -1 if options.transpose_b else -2}
        return Summed(axes[name], options.precision) if name in axes else None

    def grouped(self, options: MatmulOptions) -> Epilogue | None:
        is_plain = not (options.transpose_a or options.transpose_b)
        return Epilogue(options.activation, options.precision) if is_plain else None
