"""Matrix products: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

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


# Largest K whose int8 products, each of them 2^14 at the most, have float32 sums without rounding.
MAX_EXACT_K = 2**10
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
        k, n = a.shape[-1], b.shape[-1]
        step = n if b.dtype == torch.float32 else max(MIN_COLUMNS, MAX_CONVERTED * n // max(b.numel(), 1))
        # Sums of so many int8 products are exact in float32, whose matmul is fast; torch's own integer matmul is a plain loop.
        depth = MAX_EXACT_K if a.dtype == torch.int8 else max(k, 1)
        rows = [part.float() for part in torch.split(a, depth, -1)]
        if step >= n:
            return (_finished(_sums(rows, b, depth), inputs, options, out_dtype, slice(None)),)
        batch = broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]), "batch dimensions")
        out = torch.empty((*batch, a.shape[-2], n), dtype=out_dtype)
        for begin in range(0, n, step):
            part = slice(begin, begin + step)
            out[..., part] = _finished(_sums(rows, b[..., part], depth), inputs, options, out_dtype, part)
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


def _sums(rows: Sequence[torch.Tensor], columns: torch.Tensor, depth: int) -> torch.Tensor:
    """Returns (…, M, N) sums of products: int32 of int8 columns, else float32.

    Args:
        rows: (…, M, depth) float32 parts along K of the first operand; the last may be shorter.
        columns: (…, K, N) second operand, of any dtype.
        depth: Length of a part.
    """
    products = (
        torch.matmul(*pair) for pair in zip(rows, (one.float() for one in torch.split(columns, depth, -2)), strict=True)
    )
    if columns.dtype != torch.int8:
        return next(products)
    acc = next(products).to(torch.int32)
    for product in products:
        acc += product.to(torch.int32)
    return acc


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
