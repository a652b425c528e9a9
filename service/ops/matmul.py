"""Matrix products with an epilogue: scales, bias and activation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from tilewire.service.errors import BeyondLimit, InvalidRequest
from tilewire.service.ops.op import (
    FLOATS16_32,
    Batching,
    Chunking,
    JoinStrategy,
    Op,
    OpOptions,
    OutDType,
    Sharding,
    TensorType,
    Types,
    WarmupCase,
    broadcast_shapes,
    check_counts,
    check_out_dtype,
    check_same_dtype,
    check_vector,
)

Activation = Literal["none", "relu", "leaky_relu", "gelu", "silu", "sigmoid", "tanh"]
Precision = Literal["tf32", "tf32x3", "ieee", "fast"]

# The largest K whose int8 products cannot overflow an int32 accumulator, each of them -128 × -128 = 2^14.
MAX_INT8_K = 2**17 - 1

# Operations below which products share a launch whatever their shapes: alone, they would not fill a GPU.
SMALL_FLOPS = 2 * 512**3

_FP8 = ("float8_e4m3fn", "float8_e5m2")


class MatmulOptions(OpOptions, frozen=True, tag="matmul"):
    """Options of `matmul`."""

    transpose_a: Annotated[bool, msgspec.Meta(description="Swap the last two dimensions of `a`.")] = False
    transpose_b: Annotated[bool, msgspec.Meta(description="Swap the last two dimensions of `b`.")] = False
    activation: Annotated[Activation, msgspec.Meta(description="Applied to the sum with bias, in float32.")] = "none"
    out_dtype: Annotated[OutDType | None, msgspec.Meta(description="Dtype of the result.")] = None
    precision: Annotated[
        Precision, msgspec.Meta(description="How float32 inputs are multiplied; `fast` is for sums of float8 products.")
    ] = "ieee"


class Matmul(Op[MatmulOptions]):
    """out = activation(a @ b + bias)."""

    name = "matmul"
    summary = "out = activation(a @ b + bias), with leading dimensions as broadcast batches."
    required = ("a", "b")
    optional = ("bias", "a_scale", "b_scale")
    dtypes = (*FLOATS16_32, "int8", *_FP8)
    options = MatmulOptions
    ranks = {"a": 2, "b": 2, "out": 2}
    example = {"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]], "dtype": "float32"}
    warmup = WarmupCase({}, {"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]}, [[[19, 22], [43, 50]]])

    def infer(self, types: Types, options: MatmulOptions) -> tuple[tuple[TensorType, ...], int]:
        dtype = check_same_dtype(types)
        m, k = _matrix("a", types["a"], options.transpose_a)
        k_of_b, n = _matrix("b", types["b"], options.transpose_b)
        if k != k_of_b:
            raise InvalidRequest(f"b: its inner dimension is {k_of_b}, but that of a is {k}")
        if dtype == "int8" and k > MAX_INT8_K:
            raise BeyondLimit(f"a: K = {k} overflows the int32 accumulator of int8; the limit is {MAX_INT8_K}")
        batch = broadcast_shapes(types["a"].shape[:-2], types["b"].shape[:-2], "batch dimensions")
        if m and n and 0 not in batch:
            check_counts("a", rows=m, columns=k, matrices=math.prod(batch))
            check_counts("b", columns=n)
        default = {"int8": "int32"}.get(dtype, "bfloat16" if dtype in _FP8 else dtype)
        allowed = ("int32", *FLOATS16_32) if dtype == "int8" else FLOATS16_32
        out = TensorType(check_out_dtype(options.out_dtype, default, allowed), (*batch, m, n))
        if options.precision == "fast" and dtype not in _FP8:
            raise InvalidRequest(f"precision: fast is for float8 inputs; a is {dtype}")
        if options.precision not in ("ieee", "fast") and dtype != "float32":
            raise InvalidRequest(f"precision: {options.precision} is for float32 inputs; a is {dtype}")
        if out.dtype == "int32" and options.activation not in ("none", "relu"):
            raise InvalidRequest(f"activation: {options.activation} needs a floating out_dtype; it is int32")
        _check_epilogue_operands(types, dtype, out, (m, n))
        return (out,), 2 * math.prod(batch) * m * n * k

    def batching(
        self, types: Types, residents: frozenset[str], options: MatmulOptions, outputs: Sequence[TensorType]
    ) -> Batching[MatmulOptions] | None:
        """Rows of `a` against the same resident `b`; small products of two matrices each."""
        a, b, (out,) = types["a"], types["b"], outputs
        if "a" in residents or 0 in a.shape:
            return None
        if "b" in residents:
            # A scale for each row of `a` would have to be concatenated, too.
            are_shared = residents == types.keys() - {"a"} and "a_scale" not in types
            if options.transpose_a or len(b.shape) != 2 or not are_shared:
                return None
            return Batching(JoinStrategy.ROWS, (options, a.dtype, a.shape[-1], out.dtype), options)
        is_plain = len(types) == len(a.shape) == len(b.shape) == 2
        k = a.shape[0 if options.transpose_a else -1]
        if is_plain and b.num_elements and 2 * out.num_elements * k <= SMALL_FLOPS:
            return Batching(JoinStrategy.STACK, (options, a.dtype, out.dtype), options)
        return None

    def chunking(self, types: Types, options: MatmulOptions, outputs: Sequence[TensorType]) -> Chunking | None:
        """Rows of `a`, with all of `b`."""
        is_plain = len(types["a"].shape) == len(outputs[0].shape) == 2
        if not is_plain or options.transpose_a or "a_scale" in types:
            return None
        return Chunking(("a",))

    def sharding(self, types: Types, options: MatmulOptions) -> Sharding:
        """Columns of `b`, with their bias and scales."""
        axes = {"b": -2 if options.transpose_b else -1}
        for name in ("bias", "b_scale"):
            if name in types and types[name].num_elements > 1:
                axes[name] = -1
        return Sharding("b", axes)


def _matrix(name: str, operand: TensorType, transposed: bool) -> tuple[int, int]:
    if len(operand.shape) < 2:
        raise InvalidRequest(f"{name}: rank {len(operand.shape)}; matmul needs at least 2 dimensions")
    rows, columns = operand.shape[-2:]
    return (columns, rows) if transposed else (rows, columns)


def _check_epilogue_operands(types: Types, dtype: str, out: TensorType, mn: tuple[int, int]) -> None:
    m, n = mn
    check_vector("bias", types, n, ("int32",) if out.dtype == "int32" else FLOATS16_32)
    for name, rows, vectors in (("a_scale", m, ((m,), (m, 1))), ("b_scale", n, ((n,), (1, n)))):
        scale = types.get(name)
        if scale is None:
            continue
        if dtype not in _FP8:
            raise InvalidRequest(f"{name}: scales are for float8 inputs; a is {dtype}")
        if scale.dtype != "float32":
            raise InvalidRequest(f"{name}: dtype {scale.dtype}; expected float32")
        if scale.shape not in ((), (1,), (1, 1), *vectors):
            raise InvalidRequest(f"{name}: shape {list(scale.shape)}; expected one element or {rows}")
