"""Types of calls: operands, options, tensor descriptions, answers. Values only; no HTTP."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np

from tilewire._arrays.host import Array

Activation = Literal["none", "relu", "leaky_relu", "gelu", "silu", "sigmoid", "tanh"]
Precision = Literal["ieee", "tf32", "tf32x3", "fast"]
Metric = Literal["dot", "cosine", "l2"]
ReduceKind = Literal["sum", "mean", "max", "min", "argmax", "argmin", "logsumexp", "norm"]
NormalizeKind = Literal["layer", "rms", "l2"]
BinaryFunction = Literal["mul", "sub", "div", "maximum", "minimum"]
UnaryFunction = Literal[
    "exp", "log", "sqrt", "rsqrt", "abs", "neg", "relu", "gelu", "silu", "sigmoid", "tanh"
]  # fmt: skip
PointwiseFunction = BinaryFunction | UnaryFunction
# Devices of a host that hold a tensor: all, one, or by its size.
Placement = Literal["auto", "replicate", "single", "shard"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A resident tensor, as the server describes it. It is an operand, too.

    Attributes:
        name: Name without the `@`.
        shape: Dimensions.
        dtype: Name of the dtype.
        nbytes: Size in bytes.
        created: Time when it was stored, as the server writes times; None where it is left out.
        last_used: Time when a request last used it, likewise.
        hits: Number of requests that used it, likewise.
        placement: Devices that shall hold it, `replicate` for all, `single`, or `shard` for all with a part each; likewise.
        engines: Devices that hold it, or a part of it, by index; likewise.
        axis: Axis along which it is cut, from the last, -1; None where it is not cut.
        version: Number that each change of the name raises, for `if_match`; None where it is left out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    created: str | float | None = None
    last_used: str | float | None = None
    hits: int | None = None
    placement: str | None = None
    engines: tuple[int, ...] | None = None
    axis: int | None = None
    version: int | None = None


class Resident:
    """A handle of a resident tensor: the name, and its description where it is known. The base of `Tensor`."""

    __slots__ = ("_described", "name")
    # NumPy's operators leave `array @ handle` to the handle.
    __array_ufunc__: None = None

    def __init__(self, name: str, described: TensorInfo | None = None) -> None:
        self.name = name
        self._described = described

    @property
    def described(self) -> TensorInfo | None:
        """Description, or None where the server has not sent it yet."""
        return self._described

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return self._known().shape

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return self._known().dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._known().shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._known().nbytes

    @property
    def version(self) -> int | None:
        """Version that was described last, for `if_match`; None where the server sends none."""
        return self._known().version

    def _known(self) -> TensorInfo:
        if self._described is None:
            raise RuntimeError(f"@{self.name} is not described yet; type: await handle.describe()")
        return self._described

    def __repr__(self) -> str:
        if self._described is None:
            return f"{type(self).__name__}({self.name!r})"
        return f"{type(self).__name__}({self.name!r}, shape={self._described.shape}, dtype={self._described.dtype})"

    def _repr_html_(self) -> str:
        info = self._described
        cells = [("tensor", f"@{self.name}")]
        if info is not None:
            cells += [("shape", " × ".join(map(str, info.shape)) or "scalar"), ("dtype", info.dtype)]
            cells += [("size", f"{info.nbytes:,} bytes")]
        # Names hold no character that HTML gives a meaning to; dtypes come from a list.
        rows = "".join(f"<tr><th>{key}</th><td>{value}</td></tr>" for key, value in cells)
        return f"<table>{rows}</table>"


# Versions of which a resident must have one: a number, several, those of handles or descriptions, or any.
IfMatch = int | TensorInfo | Resident | Collection[int] | Literal["*"]
# An operand that makes the answer a NumPy array: an array, a list, a number, or a resident tensor ("@weights/w1").
HostOperand = Array | np.generic | complex | str | TensorInfo | Resident | Sequence[Any]
# Also arrays of torch, JAX and CuPy, and whatever np.asarray takes: the answer then comes from the same library.
Operand = Any


class TopK(NamedTuple):
    """The best elements and where they were found.

    Attributes:
        values: (…, k), best first.
        indices: (…, k), int64.
    """

    values: Any
    indices: Any


class CallOptions(TypedDict, total=False):
    """Options that every op takes.

    Attributes:
        timeout_ms: Milliseconds after which the server no longer starts the request, retries included.
        request_id: Echoed in the answer and written to the server's log.
        if_match: Version, or several, of which each resident among the operands must have one; else `PreconditionFailed`.
    """

    timeout_ms: float | None
    request_id: str | None
    if_match: IfMatch | None


class DtypeOptions(CallOptions, total=False):
    """Options that every op takes whose result has a dtype to choose.

    Attributes:
        out_dtype: Dtype of the result: a name, anything that `np.dtype` takes, or a dtype of torch.
        durable: With `store=`: acknowledge once a copy outside of the engine exists, so that its death loses nothing.
    """

    out_dtype: Any
    durable: bool


class MatmulOptions(DtypeOptions, total=False):
    """Options of `matmul`.

    Attributes:
        bias: (N,), added before the activation.
        a_scale: One element or one for each row of `a`, for float8 inputs.
        b_scale: One element or one for each column of `b`, for float8 inputs.
        transpose_a: Swap the last two dimensions of `a`.
        transpose_b: Swap the last two dimensions of `b`.
        activation: Function applied to the sum with bias.
        precision: Arithmetic of float32 inputs (`ieee`, the default, `tf32` or `tf32x3`) and of float8 ones (`fast`).
    """

    bias: Operand | None
    a_scale: Operand | None
    b_scale: Operand | None
    transpose_a: bool
    transpose_b: bool
    activation: Activation
    precision: Precision | None


class SoftmaxOptions(DtypeOptions, total=False):
    """Options of `softmax`.

    Attributes:
        axis: Axis that sums to one; the last by default.
        log: Log-softmax instead of softmax.
    """

    axis: int
    log: bool


class AddOptions(DtypeOptions, total=False):
    """Options of `add`.

    Attributes:
        alpha: out = a + alpha·b; 1 by default.
    """

    alpha: float


class SearchOptions(CallOptions, total=False):
    """Options of `search`.

    Attributes:
        bias: (N,), added to the scores; `-inf` excludes an item, `+inf` for `l2`.
        metric: Score of a query and an item; `dot` by default. `l2` is the squared distance.
        precision: Arithmetic of float32 inputs.
    """

    bias: Operand | None
    metric: Metric
    precision: Precision | None


class TopKOptions(CallOptions, total=False):
    """Options of `topk`.

    Attributes:
        axis: Axis that is searched; the last by default.
        largest: Largest elements (the default) or smallest.
    """

    axis: int
    largest: bool


class ReduceOptions(DtypeOptions, total=False):
    """Options of `reduce`.

    Attributes:
        axis: Axis that disappears; None or `all` for every axis.
        keepdims: Keep the axis with length 1.
    """

    axis: int | Literal["all"] | None
    keepdims: bool


class NormalizeOptions(DtypeOptions, total=False):
    """Options of `normalize`.

    Attributes:
        weight: (N,), multiplied with the normalized elements.
        bias: (N,), added to them.
        axis: Axis that is normalized; the last by default.
        eps: Added under the root; for `l2` the smallest divisor. 1e-5 for `layer`, 1e-6 for `rms`, 1e-12 for `l2`.
    """

    weight: Operand | None
    bias: Operand | None
    axis: int
    eps: float


class PointwiseOptions(DtypeOptions, total=False):
    """Options of `pointwise`.

    Attributes:
        scale: out = fn · scale + shift; 1 by default.
        shift: Added last; 0 by default.
    """

    scale: float
    shift: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A result and what the server says about how it came to be.

    Attributes:
        outputs: Arrays by output name; empty where the result was stored.
        handle: Handle of the stored result, where `store=` was given.
        request_id: The server's id of the request.
        batch_size: Number of requests that shared the launch; None where the server leaves it out.
        timings_ms: Milliseconds by stage: `receive`, `queue`, `h2d`, `kernel`, `d2h`.
    """

    outputs: Mapping[str, Any]
    handle: Any
    request_id: str | None
    batch_size: int | None
    timings_ms: Mapping[str, float]

    @property
    def result(self) -> Any:
        """The array, the handle of a stored one, or values and indices of ops with both."""
        if self.handle is not None:
            return self.handle
        if set(self.outputs) == {"values", "indices"}:
            return TopK(self.outputs["values"], self.outputs["indices"])
        return self.outputs if len(self.outputs) != 1 else next(iter(self.outputs.values()))

    @property
    def array(self) -> Any:
        """The one array of the result.

        Raises:
            TypeError: The result was stored, or there are several.
        """
        if self.handle is not None:
            raise TypeError(f"the result is stored as @{self.handle.name}; get() fetches it")
        if len(self.outputs) != 1:
            raise TypeError(f"the result has {len(self.outputs)} arrays: {', '.join(self.outputs)}; use outputs")
        return next(iter(self.outputs.values()))

    @property
    def stored(self) -> Any:
        """The handle of the stored result.

        Raises:
            TypeError: The result was not stored.
        """
        if self.handle is None:
            raise TypeError("the result is an array: no store= was given")
        return self.handle
