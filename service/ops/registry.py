"""What each op takes and gives: operands, options, dtypes, output type, flops and bytes. One table for every room.

The gateway plans a request with it before any memory is taken; the engine reads the options; `/v2`, the OpenAPI document and
the docs are written from it. Knows no tensor data, no HTTP and no device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BeyondLimit, InvalidRequest, UnknownName

Activation = Literal["none", "relu", "leaky_relu", "gelu", "silu", "sigmoid", "tanh"]
Precision = Literal["tf32", "tf32x3", "ieee"]
OutDType = Literal["float16", "bfloat16", "float32", "float64", "int32", "int64"]

# The largest K whose int8 products cannot overflow an int32 accumulator: 2^31 / 127^2, rounded down.
MAX_INT8_K = 133_000


class TensorType(msgspec.Struct, frozen=True, array_like=True):
    """Dtype and shape: all that is known of a tensor before its bytes are touched."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Product of the shape, in Python's unbounded integers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in C order."""
        return self.num_elements * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class MatmulOptions(msgspec.Struct, frozen=True, tag="matmul", forbid_unknown_fields=True):
    """Options of `matmul`."""

    transpose_a: Annotated[bool, msgspec.Meta(description="Swap the last two dimensions of `a`.")] = False
    transpose_b: Annotated[bool, msgspec.Meta(description="Swap the last two dimensions of `b`.")] = False
    activation: Annotated[Activation, msgspec.Meta(description="Applied to the sum with bias, in float32.")] = "none"
    out_dtype: Annotated[OutDType | None, msgspec.Meta(description="Dtype of the result.")] = None
    precision: Annotated[Precision, msgspec.Meta(description="How float32 inputs are multiplied.")] = "ieee"


class SoftmaxOptions(msgspec.Struct, frozen=True, tag="softmax", forbid_unknown_fields=True):
    """Options of `softmax`."""

    axis: Annotated[int, msgspec.Meta(description="The axis that sums to one.")] = -1
    out_dtype: Annotated[OutDType | None, msgspec.Meta(description="Dtype of the result.")] = None
    log: Annotated[bool, msgspec.Meta(description="Log-softmax instead of softmax.")] = False


class AddOptions(msgspec.Struct, frozen=True, tag="add", forbid_unknown_fields=True):
    """Options of `add`."""

    alpha: Annotated[int | float, msgspec.Meta(description="out = a + alpha·b.")] = 1
    out_dtype: Annotated[OutDType | None, msgspec.Meta(description="Dtype of the result.")] = None

    def __post_init__(self) -> None:
        """Refuses an integer that does not fit 64 bits.

        Raises:
            ValueError: An integer that does not fit 64 bits.
        """
        if isinstance(self.alpha, int) and not -(2**63) <= self.alpha < 2**63:
            raise ValueError("expected 64 bits, or an exponent")


Options = MatmulOptions | SoftmaxOptions | AddOptions


class Limits(msgspec.Struct, frozen=True):
    """Bounds on what one request may ask for.

    Attributes:
        max_rank: Dimensions of an operand.
        max_elements: Elements of an operand or of the result.
        max_result_bytes: Bytes of the result.
    """

    max_rank: int = 8
    max_elements: int = 2**33
    max_result_bytes: int = 2**30


class Plan(msgspec.Struct, frozen=True):
    """What a request will produce and cost, known from shapes alone.

    Attributes:
        out: Dtype and shape of the result.
        flops: Floating-point (for int8: integer) operations.
        moved_bytes: Bytes read and written when each operand is touched once.
    """

    out: TensorType
    flops: int
    moved_bytes: int

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        """Types of all results."""
        return (self.out,)


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: As in the URL.
        summary: One sentence for the documents.
        required: Names of the inputs that must be there, in order; an unnamed tensor stands for the first.
        optional: Names of further inputs.
        dtypes: Dtypes of the main inputs.
        options: The value object that holds its options.
        infer: Output type and flops from operand types and options.
    """

    name: str
    summary: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    dtypes: tuple[str, ...]
    options: type[Options]
    infer: Callable[[Mapping[str, TensorType], Options], tuple[TensorType, int]]
    outputs: tuple[str, ...] = ("out",)

    @property
    def inputs(self) -> tuple[str, ...]:
        """All input names, required ones first."""
        return self.required + self.optional


def op_named(name: str) -> Op:
    """Looks an op up by its name.

    Raises:
        UnknownName: No such op.
    """
    op = OPS.get(name)
    if op is None:
        raise UnknownName(f"op: no op {name[:64]!r}; there are {', '.join(OPS)}")
    return op


def parse_options(op: Op, raw: Mapping[str, object]) -> Options:
    """Turns option values, as text or as JSON values, into the op's value object.

    Raises:
        InvalidRequest: An unknown option, or a value that is not of its type; the detail names it.
    """
    known = op.options.__struct_fields__
    for name in raw:
        if name not in known:
            raise InvalidRequest(f"{name[:64]}: {op.name} has no such option; it has {', '.join(known)}")
    for name, value in raw.items():
        try:
            msgspec.convert({name: value}, op.options, strict=False)
        except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:
            reason = str(error).split(" - at ")[0]
            choices = _choices(op, name)
            expected = f"expected one of {', '.join(choices)}" if choices else reason
            raise InvalidRequest(f"{name}: {expected}; got {str(value)[:64]!r}") from None
    return msgspec.convert(dict(raw), op.options, strict=False)


def _choices(op: Op, name: str) -> list[str]:
    """The values that an option may have, when they can be counted up."""
    schema = msgspec.json.schema(op.options)["$defs"][op.options.__name__]["properties"][name]
    return [
        str(value) for part in (schema, *schema.get("anyOf", ())) for value in part.get("enum", ()) if value is not None
    ]


def plan(op: Op, operands: Mapping[str, TensorType], options: Options, limits: Limits) -> Plan:
    """Validates operands against the op and works out the result and its cost.

    Args:
        op: The operation.
        operands: Dtype and shape of each input by name.
        options: The op's options.
        limits: What a request may ask for.

    Raises:
        InvalidRequest: A missing or unknown input, a dtype or a shape that cannot be right.
        BeyondLimit: Rank, elements or result size over the limits.
    """
    for name in op.required:
        if name not in operands:
            raise InvalidRequest(f"{name}: {op.name} needs this input; got {', '.join(operands) or 'none'}")
    for name, operand in operands.items():
        _check_operand(op, name, operand, limits)
    out, flops = op.infer(operands, options)
    if math.prod(dim or 1 for dim in out.shape) > limits.max_elements:
        raise BeyondLimit(f"out: {out} has more than {limits.max_elements} elements")
    if out.nbytes > limits.max_result_bytes:
        raise BeyondLimit(f"out: {out} is {out.nbytes} bytes, over the limit of {limits.max_result_bytes}")
    return Plan(out, flops, sum(operand.nbytes for operand in operands.values()) + out.nbytes)


def check_limits(name: str, operand: TensorType, limits: Limits) -> None:
    """Checks a tensor against the limits.

    Raises:
        BeyondLimit: Rank or elements over the limits; the detail names the tensor.
    """
    if len(operand.shape) > limits.max_rank:
        raise BeyondLimit(f"{name}: rank {len(operand.shape)} is over the limit of {limits.max_rank}")
    # A zero must not hide what the other dimensions ask for: strides are products of them.
    if math.prod(dim or 1 for dim in operand.shape) > limits.max_elements:
        raise BeyondLimit(f"{name}: more than {limits.max_elements} elements")


def _check_operand(op: Op, name: str, operand: TensorType, limits: Limits) -> None:
    if name not in op.inputs:
        raise InvalidRequest(f"{name[:64]}: {op.name} has no such input; it has {', '.join(op.inputs)}")
    check_limits(name, operand, limits)
    if name in op.required and operand.dtype not in op.dtypes:
        raise InvalidRequest(f"{name}: {op.name} does not take {operand.dtype}; expected one of {', '.join(op.dtypes)}")


def _out_dtype(asked: str | None, default: str, allowed: tuple[str, ...]) -> str:
    dtype = asked or default
    if dtype not in allowed:
        raise InvalidRequest(f"out_dtype: {dtype} is not offered here; expected one of {', '.join(allowed)}")
    return dtype


def _same_dtype(operands: Mapping[str, TensorType]) -> str:
    a, b = operands["a"].dtype, operands["b"].dtype
    if a != b:
        raise InvalidRequest(f"b: dtype {b} differs from that of a, {a}; both must be the same")
    return a


def _broadcast(a: tuple[int, ...], b: tuple[int, ...], what: str) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    padded_a, padded_b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    if any(x != y and 1 not in (x, y) for x, y in zip(padded_a, padded_b, strict=True)):
        raise InvalidRequest(f"b: {what} {list(b)} do not broadcast with {list(a)} of a")
    return tuple(y if x == 1 else x for x, y in zip(padded_a, padded_b, strict=True))


_FLOATS16_32 = ("float16", "bfloat16", "float32")
_FP8 = ("float8_e4m3fn", "float8_e5m2")


def _matrix(name: str, operand: TensorType, transposed: bool) -> tuple[int, int]:
    if len(operand.shape) < 2:
        raise InvalidRequest(f"{name}: rank {len(operand.shape)}; matmul needs at least 2 dimensions")
    rows, columns = operand.shape[-2:]
    return (columns, rows) if transposed else (rows, columns)


def _infer_matmul(operands: Mapping[str, TensorType], options: Options) -> tuple[TensorType, int]:
    assert isinstance(options, MatmulOptions), "This is a bug."
    dtype = _same_dtype(operands)
    m, k = _matrix("a", operands["a"], options.transpose_a)
    k_of_b, n = _matrix("b", operands["b"], options.transpose_b)
    if k != k_of_b:
        raise InvalidRequest(f"b: its inner dimension is {k_of_b}, but that of a is {k}")
    if dtype == "int8" and k > MAX_INT8_K:
        raise BeyondLimit(f"a: K = {k} overflows the int32 accumulator of int8; the limit is {MAX_INT8_K}")
    batch = _broadcast(operands["a"].shape[:-2], operands["b"].shape[:-2], "batch dimensions")
    default = {"int8": "int32"}.get(dtype, "bfloat16" if dtype in _FP8 else dtype)
    allowed = ("int32", *_FLOATS16_32) if dtype == "int8" else _FLOATS16_32
    out = TensorType(_out_dtype(options.out_dtype, default, allowed), (*batch, m, n))
    if options.precision != "ieee" and dtype != "float32":
        raise InvalidRequest(f"precision: {options.precision} is for float32 inputs; a is {dtype}")
    if out.dtype == "int32" and options.activation not in ("none", "relu"):
        raise InvalidRequest(f"activation: {options.activation} needs a floating out_dtype; it is int32")
    _check_epilogue_operands(operands, dtype, out, (m, n))
    return out, 2 * math.prod(batch) * m * n * k


def _check_epilogue_operands(
    operands: Mapping[str, TensorType], dtype: str, out: TensorType, mn: tuple[int, int]
) -> None:
    m, n = mn
    bias = operands.get("bias")
    if bias is not None:
        allowed = ("int32",) if out.dtype == "int32" else _FLOATS16_32
        if bias.dtype not in allowed:
            raise InvalidRequest(f"bias: dtype {bias.dtype}; expected one of {', '.join(allowed)}")
        if bias.shape != (n,):
            raise InvalidRequest(f"bias: shape {list(bias.shape)}; expected [{n}]")
    for name, rows, vectors in (("a_scale", m, ((m,), (m, 1))), ("b_scale", n, ((n,), (1, n)))):
        scale = operands.get(name)
        if scale is None:
            continue
        if dtype not in _FP8:
            raise InvalidRequest(f"{name}: scales are for float8 inputs; a is {dtype}")
        if scale.dtype != "float32":
            raise InvalidRequest(f"{name}: dtype {scale.dtype}; expected float32")
        if scale.shape not in ((), (1,), (1, 1), *vectors):
            raise InvalidRequest(f"{name}: shape {list(scale.shape)}; expected one element or {rows}")


def _infer_softmax(operands: Mapping[str, TensorType], options: Options) -> tuple[TensorType, int]:
    assert isinstance(options, SoftmaxOptions), "This is a bug."
    x = operands["x"]
    rank = len(x.shape)
    if rank < 1:
        raise InvalidRequest("x: rank 0; softmax needs at least 1 dimension")
    if not -rank <= options.axis < rank:
        raise InvalidRequest(f"axis: {options.axis} is outside [{-rank}, {rank - 1}] for x of rank {rank}")
    out = TensorType(_out_dtype(options.out_dtype, x.dtype, _FLOATS16_32), x.shape)
    return out, 5 * out.num_elements


def _infer_add(operands: Mapping[str, TensorType], options: Options) -> tuple[TensorType, int]:
    assert isinstance(options, AddOptions), "This is a bug."
    dtype = _same_dtype(operands)
    is_float = DTYPES[dtype].is_float
    if not is_float and not isinstance(options.alpha, int):
        raise InvalidRequest(f"alpha: {options.alpha} must be an integer for {dtype}")
    allowed = (*_FLOATS16_32, "float64") if is_float else ("int32", "int64", "float32", "float64")
    shape = _broadcast(operands["a"].shape, operands["b"].shape, "dimensions")
    out = TensorType(_out_dtype(options.out_dtype, dtype, allowed), shape)
    return out, (1 if options.alpha == 1 else 2) * out.num_elements


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            name="matmul",
            summary="out = activation(a @ b + bias), with leading dimensions as broadcast batches.",
            required=("a", "b"),
            optional=("bias", "a_scale", "b_scale"),
            dtypes=("float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"),
            options=MatmulOptions,
            infer=_infer_matmul,
        ),
        Op(
            name="softmax",
            summary="out = softmax(x) or log-softmax, along one axis.",
            required=("x",),
            optional=(),
            dtypes=_FLOATS16_32,
            options=SoftmaxOptions,
            infer=_infer_softmax,
        ),
        Op(
            name="add",
            summary="out = a + alpha·b, with NumPy broadcasting.",
            required=("a", "b"),
            optional=(),
            dtypes=(*_FLOATS16_32, "float64", "int32", "int64"),
            options=AddOptions,
            infer=_infer_add,
        ),
    )
}
