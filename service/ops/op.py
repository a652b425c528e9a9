"""The interface of an op, and the values that describe its operands, its results and its cost.

An op is one object of a subclass of `Op`, in a file of its own beside this one. It holds all that the service needs of the op
without any tensor data: inputs, options, dtypes, inference of the outputs, batching, chunking, examples.
"""

from __future__ import annotations

import abc
import enum
import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import msgspec

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BeyondLimit, InvalidRequest

OutDType = Literal["float16", "bfloat16", "float32", "float64", "int32", "int64"]

FLOATS16_32 = ("float16", "bfloat16", "float32")
# NumPy's own bound on rank; `Limits.max_rank` is the configured, lower one.
MAX_RANK = 64
# Largest number that fits the 64-bit integers of every process. A zero elsewhere in the shape would hide a larger one.
MAX_DIM = 2**63 - 1
# Most rows of an operand, and most elements along an axis: kernels count both in 32 bits, past the end up to that of the last
# block. Elementwise ops count in 64. An empty result, for which nothing is launched, has no such limit.
MAX_COUNT = 2**30
# Options whose text is longer have a digest as their key.
MAX_KEY_CHARACTERS = 512
# Words for JSON Schema's types of options; the first that fits: whole numbers are numbers, too.
_TYPES = {"boolean": "true or false", "number": "a number", "integer": "an integer"}


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


def can_be_shape(shape: Sequence[int]) -> bool:
    """Whether a tensor of any format can have these dimensions."""
    return len(shape) <= MAX_RANK and all(0 <= size <= MAX_DIM for size in shape)


Types = Mapping[str, TensorType]


class OpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of an op; each op has a subclass, tagged with the op's name."""

    @property
    def key(self) -> str:
        """Key of the options in a cache. Unlike `==`, it tells 1 from 1.0, and 0.0 from -0.0; NaN equals itself."""
        text = repr(self)
        # A program's text has up to 64 KiB, and caches hold thousands.
        return text if len(text) <= MAX_KEY_CHARACTERS else hashlib.sha256(text.encode()).hexdigest()


OptionsT = TypeVar("OptionsT", bound=OpOptions)


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one request.

    Attributes:
        max_rank: Largest number of dimensions of an operand.
        max_elements: Largest number of elements of an operand or of a result.
        max_result_bytes: Largest number of bytes of all results together.
    """

    max_rank: int = 8
    max_elements: int = 2**33
    max_result_bytes: int = 2**30


class Plan(msgspec.Struct, frozen=True):
    """Results and cost of a request, inferred from shapes alone.

    Attributes:
        outputs: Dtype and shape of each result, in the order of `Op.outputs`.
        flops: Floating-point (for int8: integer) operations.
        moved_bytes: Bytes read and written when each operand is touched once.
    """

    outputs: tuple[TensorType, ...]
    flops: int
    moved_bytes: int


class Work(NamedTuple):
    """Part of a job that is counted under one op and dtype.

    Attributes:
        dtype: Dtype of its first input.
        moved_bytes: Bytes read and written when each operand is touched once.
        shared_bytes: Bytes of residents among them, which jobs of one launch read once.
    """

    op: str
    dtype: str
    flops: int
    moved_bytes: int
    shared_bytes: int


class JoinStrategy(enum.Enum):
    """Strategy that joins the operands of several requests for one launch.

    Attributes:
        ROWS: Concatenate rows: all dimensions but the last are flattened.
        FLAT: Concatenate elements.
        STACK: Stack whole operands when their shapes are equal; else a launch each, or one grouped launch.
    """

    ROWS = "rows"
    FLAT = "flat"
    STACK = "stack"


@dataclass(frozen=True, slots=True)
class Batching(Generic[OptionsT]):
    """Condition for sharing a launch: equal strategy, key and residents.

    Attributes:
        key: Everything else that must be equal: options, dtypes, widths.
        options: Options of the joint launch.
    """

    strategy: JoinStrategy
    key: Hashable
    options: OptionsT


@dataclass(frozen=True, slots=True)
class Chunking:
    """Division of a large request along rows, so that transfers overlap with computing.

    Attributes:
        inputs: Names of the inputs of which a chunk needs only its own rows. The others are transferred whole, first.
        is_flat: A row is one element of the flattened operands; else it is an index of the first dimension.
    """

    inputs: tuple[str, ...]
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """Order in which the results of parts are merged, where each part has its own best elements.

    Attributes:
        is_nan_large: Whether NaN counts as the largest; else it comes last.
    """

    k: int
    largest: bool
    is_nan_large: bool


@dataclass(frozen=True, slots=True)
class Sharding:
    """Division of a request among engines, each of which has one part of a resident.

    Without a selection a part computes its own range of the last axis of the only result.

    Attributes:
        field: Input that must be sharded.
        axes: Axis along which each input is cut that is needed in parts, from the last, -1. The others are needed whole.
        selection: Merge of the parts' results; None where they lie side by side.
    """

    field: str
    axes: Mapping[str, int]
    selection: Selection | None = None


@dataclass(frozen=True, slots=True)
class WarmupCase:
    """A request with a known answer, which every engine computes before it is ready.

    Attributes:
        inputs: Values of each input, in float32.
        outputs: Values of each output, exact.
    """

    options: Mapping[str, object]
    inputs: Mapping[str, Sequence[Any]]
    outputs: Sequence[Sequence[Any]]


class Op(abc.ABC, Generic[OptionsT]):
    """One operation.

    Attributes:
        name: Name, as in the URL.
        summary: Description in one sentence.
        required: Names of the inputs that must be given, in order. An unnamed tensor stands for the first.
        optional: Names of the inputs that may be given.
        outputs: Names of the results, in order; `out` where there is one.
        dtypes: Dtypes that the required inputs may have.
        options: Class of the options; one without fields for an op that has none.
        needs: Names of the options that have no default.
        ranks: Rank of each required input and of each output that `/v2` shows.
        output_datatypes: `/v2` datatype of each output that is not that of the inputs.
        is_elementwise: Whether an element of the result depends on the same element of each operand only.
        example: JSON body for the OpenAPI document.
        example_options: Options of that request, beside its body.
        warmup: Request with a known answer.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ("out",)
    dtypes: ClassVar[tuple[str, ...]] = FLOATS16_32
    options: type[OptionsT]
    needs: ClassVar[tuple[str, ...]] = ()
    ranks: ClassVar[Mapping[str, int]]
    output_datatypes: ClassVar[Mapping[str, str]] = {}
    is_elementwise: ClassVar[bool] = False
    example: ClassVar[Mapping[str, Any]]
    example_options: ClassVar[Mapping[str, object]] = {}
    warmup: ClassVar[WarmupCase]

    @property
    def model(self) -> str:
        """Name of the model of `/v2`."""
        return self.name

    def complete(self, options: OpOptions) -> OpOptions:
        """Returns the options that a job carries, from those that a request has given."""
        return options

    def bound(self, options: OptionsT) -> Op[OptionsT]:
        """Returns the op whose inputs and outputs are those of a request with these options."""
        return self

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of all inputs, required ones first."""
        return self.required + self.optional

    @property
    def sole_input(self) -> tuple[str, TensorType] | None:
        """Name and type of the input of a body that is one tensor's bytes, -1 for a size that may vary; None with several."""
        return (self.required[0], TensorType("float32", (-1,))) if len(self.inputs) == 1 else None

    @property
    def own_residents(self) -> Mapping[str, str]:
        """Residents that every request reads, by input; requests do not name them."""
        return {}

    def place_of(self, field: str) -> str:
        """Returns how the detail of an error names an input."""
        return field

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the inputs that a request may give; `own_residents` are not among them."""
        return self.inputs

    def check_given(self, names: Iterable[str]) -> None:
        """Refuses names of no input that a request may give.

        Raises:
            InvalidRequest: There is one.
        """
        for name in names:
            if name not in self.given and name in self.options.__struct_fields__:
                raise InvalidRequest(
                    f"{name}: an option of {self.name}, and no input; options go into the query, under /v2 into parameters"
                )
            if name not in self.given:
                raise InvalidRequest(f"{name[:64]}: {self.name} has no such input; it has {', '.join(self.given)}")

    def expected(self, option: str) -> str:
        """Returns words for the values that an option may have."""
        schema = msgspec.json.schema(self.options)["$defs"][self.options.__name__]["properties"][option]
        parts = (schema, *schema.get("anyOf", ()))
        values = [str(value) for part in parts for value in part.get("enum", ()) if value is not None]
        types = {part.get("type") for part in parts}
        word = next((word for kind, word in _TYPES.items() if kind in types), "")
        return f"expected one of {', '.join([*filter(None, [word]), *values])}" if values else f"expected {word}"

    @abc.abstractmethod
    def infer(self, types: Types, options: OptionsT) -> tuple[tuple[TensorType, ...], int]:
        """Infers the types of the results and the number of operations.

        Args:
            types: Dtype and shape of each input by name; names, dtypes of required inputs and limits are checked already.
            options: Options of the op.

        Raises:
            InvalidRequest: A dtype, shape or option that cannot be right.
            BeyondLimit: A size that the arithmetic does not allow.
        """

    def batching(
        self, types: Types, residents: frozenset[str], options: OptionsT, outputs: Sequence[TensorType]
    ) -> Batching[OptionsT] | None:
        """Returns how a request may share a launch, or None when it runs alone.

        Args:
            types: Dtype and shape of each input; those that are no residents are in C order.
            residents: Names of the inputs that are resident; requests that share a launch have the same ones.
            options: Options of the op.
            outputs: Types of the results.
        """
        return None

    def work(
        self, types: Types, residents: frozenset[str], options: OptionsT, flops: int, moved_bytes: int
    ) -> tuple[Work, ...]:
        """Returns what a job adds to the counters: itself, or the steps of a program."""
        shared_bytes = sum(types[name].nbytes for name in residents)
        return (Work(self.name, next(iter(types.values())).dtype, flops, moved_bytes, shared_bytes),)

    def chunking(self, types: Types, options: OptionsT, outputs: Sequence[TensorType]) -> Chunking | None:
        """Returns how a request can be cut along rows, or None when rows depend on one another."""
        return None

    def sharding(self, types: Types, options: OptionsT) -> Sharding | None:
        """Returns how a request of whole operands is divided among engines that hold parts of its residents, or None."""
        return None


AnyOp = Op[Any]


class AxisOp(Op[Any]):
    """An op on the rows of `x` along the option `axis`."""

    required = ("x",)

    def batching(
        self, types: Types, residents: frozenset[str], options: Any, outputs: Sequence[TensorType]
    ) -> Batching[Any] | None:
        """Rows of equal length, with the same residents for all inputs but `x`."""
        x = types["x"]
        are_shared = residents == types.keys() - {"x"}
        if not are_shared or options.axis not in (-1, len(x.shape) - 1) or not x.num_elements:
            return None
        joint = msgspec.structs.replace(options, axis=-1)
        return Batching(JoinStrategy.ROWS, (_key_in_launch(joint), x.dtype, x.shape[-1], outputs[0].dtype), joint)

    def chunking(self, types: Types, options: Any, outputs: Sequence[TensorType]) -> Chunking | None:
        """Indices of the first dimension, where rows lie along another one."""
        rank = len(types["x"].shape)
        is_cut_across = options.axis != "all" and options.axis % rank != 0
        return Chunking(("x",)) if is_cut_across else None


class ElementwiseOp(Op[Any]):
    """An op that computes each element from the same element of each operand."""

    is_elementwise = True

    def batching(
        self, types: Types, residents: frozenset[str], options: Any, outputs: Sequence[TensorType]
    ) -> Batching[Any] | None:
        """Elements of operands of equal shape."""
        first, out = types[self.required[0]], outputs[0]
        if residents or not _are_plain(types, out) or not first.num_elements:
            return None
        return Batching(JoinStrategy.FLAT, (_key_in_launch(options), first.dtype, out.dtype), options)

    def chunking(self, types: Types, options: Any, outputs: Sequence[TensorType]) -> Chunking | None:
        """Elements, where nothing is broadcast; else indices of the first dimension, along which some operands may repeat."""
        out = outputs[0]
        if _are_plain(types, out):
            return Chunking(tuple(types), is_flat=True)
        # At least one operand has the first dimension of the result.
        return Chunking(tuple(name for name, one in types.items() if _has_first_dimension(one, out)))


def _has_first_dimension(operand: TensorType, out: TensorType) -> bool:
    return len(operand.shape) == len(out.shape) and operand.shape[0] == out.shape[0]


def _are_plain(types: Types, out: TensorType) -> bool:
    return all(one.shape == out.shape for one in types.values())


def _key_in_launch(options: OpOptions) -> str:
    """Key of what must be equal in one launch: the results of one have one dtype, however it was asked for."""
    dtype = {"out_dtype": None} if "out_dtype" in options.__struct_fields__ else {}
    return msgspec.structs.replace(options, **dtype).key


def check_limits(name: str, operand: TensorType, limits: Limits) -> None:
    """Checks a tensor against the limits.

    Raises:
        BeyondLimit: Rank or elements over the limits; the detail names the tensor.
    """
    if len(operand.shape) > limits.max_rank:
        raise BeyondLimit(f"{name}: rank {len(operand.shape)} is over the limit of {limits.max_rank}")
    # A zero must not hide the other dimensions: strides are products of them.
    if math.prod(dim or 1 for dim in operand.shape) > limits.max_elements:
        raise BeyondLimit(f"{name}: more than {limits.max_elements} elements")


def check_out_dtype(asked: str | None, default: str, allowed: tuple[str, ...]) -> str:
    """Returns the dtype of a result: the one that is asked for, if any, or the default.

    Raises:
        InvalidRequest: Not an allowed dtype.
    """
    dtype = asked or default
    if dtype not in allowed:
        raise InvalidRequest(f"out_dtype: {dtype} is not offered here; expected one of {', '.join(allowed)}")
    return dtype


def check_same_dtype(types: Types) -> str:
    """Returns the dtype of `a` and `b`.

    Raises:
        InvalidRequest: They differ.
    """
    a, b = types["a"].dtype, types["b"].dtype
    if a != b:
        raise InvalidRequest(f"b: dtype {b} differs from that of a, {a}; both must be the same")
    return a


def check_vector(name: str, types: Types, size: int, allowed: tuple[str, ...] = FLOATS16_32) -> None:
    """Checks an optional input of one element for each column.

    Raises:
        InvalidRequest: Another dtype or shape.
    """
    vector = types.get(name)
    if vector is None:
        return
    if vector.dtype not in allowed:
        raise InvalidRequest(f"{name}: dtype {vector.dtype}; expected one of {', '.join(allowed)}")
    if vector.shape != (size,):
        raise InvalidRequest(f"{name}: shape {list(vector.shape)}; expected [{size}]")


def check_counts(name: str, **counts: int) -> None:
    """Checks numbers of rows or elements of the input `name`, each by a word for what is counted.

    Raises:
        BeyondLimit: One is over `MAX_COUNT`.
    """
    for counted, count in counts.items():
        if count > MAX_COUNT:
            raise BeyondLimit(f"{name}: {count} {counted}; the limit is {MAX_COUNT}")


def check_axis(op: str, x: TensorType, axis: int) -> int:
    """Returns the index of an axis of `x`, from 0.

    Raises:
        InvalidRequest: `x` has no dimensions, or not this one.
        BeyondLimit: Too many elements along the axis, or too many rows.
    """
    rank = len(x.shape)
    if rank < 1:
        raise InvalidRequest(f"x: rank 0; {op} needs at least 1 dimension")
    if not -rank <= axis < rank:
        raise InvalidRequest(f"axis: {axis} is outside [{-rank}, {rank - 1}] for x of rank {rank}")
    axis %= rank
    if x.num_elements:
        check_counts("x", elements=x.shape[axis], rows=x.num_elements // x.shape[axis])
    return axis


def check_required(op: AnyOp, options: OpOptions) -> None:
    """Checks that the options without a default are given.

    Raises:
        InvalidRequest: One is not; the detail names it.
    """
    for name in op.needs:
        if getattr(options, name) is None:
            raise InvalidRequest(f"{name}: {op.name} needs this option; {op.expected(name)}")


def check_k(k: int | None, name: str, available: int, limit: int | None = None) -> int:
    """Returns how many elements are chosen from the input `name`; the limit holds whatever is available.

    Raises:
        InvalidRequest: Below 1, above the limit, or more than there are.
    """
    if k is None or k < 1 or (limit is not None and k > limit):
        raise InvalidRequest(f"k: {k}; expected 1 {'or more' if limit is None else f'to {limit}'}")
    if k > available:
        raise InvalidRequest(f"k: {k}; {name} has only {available} to choose from")
    return k


def broadcast_shapes(
    a: tuple[int, ...], b: tuple[int, ...], what: str, names: tuple[str, str] = ("a", "b")
) -> tuple[int, ...]:
    """Returns the shape that two shapes broadcast to, as NumPy does.

    Raises:
        InvalidRequest: They do not broadcast; the detail names the second of `names`.
    """
    rank = max(len(a), len(b))
    padded_a, padded_b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    if any(x != y and 1 not in (x, y) for x, y in zip(padded_a, padded_b, strict=True)):
        raise InvalidRequest(f"{names[1]}: {what} {list(b)} do not broadcast with {list(a)} of {names[0]}")
    return tuple(y if x == 1 else x for x, y in zip(padded_a, padded_b, strict=True))
