"""Matrix products: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from tilewire.service.engine.ops import narrow
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
# Fewer products of 16 bits are converted: asking what may be lost takes longer.
MIN_HALF_PRODUCTS = 2**19
# Inputs that follow a product.
FOLLOWING = frozenset({"bias", "a_scale", "b_scale"})


class EngineMatmul(EngineOp[MatmulOptions]):
    """Matrix products on the CPU and on the GPU."""

    pads_rows = True
    multiplies = True

    def __init__(self) -> None:
        # Least magnitudes of bfloat16 residents, for as long as their tensors live.
        self._least = WeakTensorKeyDictionary()

    def cpu(self, inputs: Operands, options: MatmulOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        """Computes some columns at a time where they are converted first, so that no large `b` is there twice."""
        a, b, (out_dtype,) = inputs["a"], inputs["b"], out_dtypes
        a, b = a.mT if options.transpose_a else a, b.mT if options.transpose_b else b
        n = b.shape[-1]
        is_plain = out_dtype == a.dtype and options.activation == "none" and not FOLLOWING & inputs.keys()
        keeps_halves = is_plain and a.numel() * n >= MIN_HALF_PRODUCTS and self._keeps_halves(inputs)
        is_taken_as_it_is = b.dtype == torch.float32 or narrow.has_int8_dot(b) or keeps_halves
        step = n if is_taken_as_it_is else max(MIN_COLUMNS, MAX_CONVERTED * n // max(b.numel(), 1))
        a = a if a.dtype == torch.int8 or keeps_halves else a.float()

        def computed(columns: slice) -> torch.Tensor:
            acc = _multiplied(a, b[..., columns])
            return acc if keeps_halves else _finished(acc, inputs, options, out_dtype, columns)

        if step >= n:
            return (computed(slice(None)),)
        batch = broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]), "batch dimensions")
        out = torch.empty((*batch, a.shape[-2], n), dtype=out_dtype)
        for begin in range(0, n, step):
            part = slice(begin, begin + step)
            out[..., part] = computed(part)
        return (out,)

    def _keeps_halves(self, inputs: Operands) -> bool:
        """Whether the operands are multiplied on the CPU as they are, in 16 bits, without a loss."""
        dtype = inputs["a"].dtype
        if not narrow.adds_in_float32(dtype):
            return False
        return dtype == torch.float16 or narrow.are_far_from_0(*(self._least_of(inputs, name) for name in ("a", "b")))

    def _least_of(self, inputs: Operands, name: str) -> float:
        """The least magnitude of an operand; that of a resident is found once."""
        x = inputs[name]
        if name not in inputs.resident:
            return narrow.least_magnitude(x)
        if x not in self._least:
            self._least[x] = narrow.least_magnitude(x)
        found: float = self._least[x]
        return found

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
    """Returns (…, M, N) products: int32 of int8 operands, else in the dtype of `a`."""
    return narrow.multiply_int8(a, b) if a.dtype == torch.int8 else torch.matmul(a, b.to(a.dtype))


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
