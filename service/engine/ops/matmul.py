"""Matrix products: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from tilewire.service.engine.ops import int8
from tilewire.service.engine.ops.op import Compute, EngineOp, Epilogue, KernelCall, Operands, Results, Summed
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import broadcast_shapes

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.01),
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


# Most elements of `b` that are converted to float32 at once: 16 MiB. Products of fewer columns than that are slow.
MAX_CONVERTED = 2**22
MIN_COLUMNS = 256


class EngineMatmul(EngineOp[MatmulOptions]):
    """Matrix products on the CPU and on the GPU."""

    pads_rows = True
    multiplies = True

    def cpu(self, inputs: Operands, options: MatmulOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        """Computes some columns at a time where they are converted first, so that no large `b` is there twice."""
        a, b, (out_dtype,) = inputs["a"], inputs["b"], out_dtypes
        a, b = a.mT if options.transpose_a else a, b.mT if options.transpose_b else b
        n = b.shape[-1]
        is_taken_as_it_is = b.dtype == torch.float32 or int8.has_dot(b)
        step = n if is_taken_as_it_is else max(MIN_COLUMNS, MAX_CONVERTED * n // max(b.numel(), 1))
        a = a if a.dtype == torch.int8 else a.float()
        if step >= n:
            return (_finished(_multiplied(a, b), inputs, options, out_dtype, slice(None)),)
        batch = broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]), "batch dimensions")
        out = torch.empty((*batch, a.shape[-2], n), dtype=out_dtype)
        for begin in range(0, n, step):
            part = slice(begin, begin + step)
            out[..., part] = _finished(_multiplied(a, b[..., part]), inputs, options, out_dtype, part)
        return (out,)

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


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns (…, M, N) products: int32 of int8 operands, else float32 of a float32 `a` and a `b` of any other dtype."""
    return int8.multiply(a, b) if a.dtype == torch.int8 else torch.matmul(a, b.float())


def _finished(
    acc: torch.Tensor, inputs: Operands, options: MatmulOptions, out_dtype: torch.dtype, columns: slice
) -> torch.Tensor:
    """Applies scales, bias and activation to the sums of these columns, and may overwrite them."""
    if out_dtype != torch.int32:
        acc = acc.float()
    if (a_scale := inputs.get("a_scale")) is not None:
        acc *= a_scale.reshape(-1, 1)
    if (b_scale := inputs.get("b_scale")) is not None:
        acc *= b_scale.reshape(1, -1) if b_scale.numel() == 1 else b_scale.reshape(1, -1)[:, columns]
    if (bias := inputs.get("bias")) is not None:
        acc += bias[columns].to(acc.dtype)
    return ACTIVATIONS[options.activation](acc)
