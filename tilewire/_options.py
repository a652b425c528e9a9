"""Options of each op, for users' type checkers and for the client. Loads neither NumPy nor httpx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from tilewire._types import IfMatch, Operand
else:
    # Who reads hints at run time finds them without NumPy.
    IfMatch = Operand = Any

# What `tilewire` exports.
__all__ = [
    "AddOptions",
    "CallOptions",
    "DtypeOptions",
    "MatmulOptions",
    "NormalizeOptions",
    "PointwiseOptions",
    "ReduceOptions",
    "SearchOptions",
    "SoftmaxOptions",
    "TopKOptions",
]

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


class CallOptions(TypedDict, total=False):
    """Options that every op takes.

    Attributes:
        timeout_ms: Milliseconds after which a request that cannot start fails (504), retries included; one that has started is
            answered. Sent as a whole number, 1 at least. A server that says nothing is given up after the client's `timeout`.
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
        bias: (N,), added to the scores; `-inf` excludes an item, `+inf` for `l2`. Where fewer than k are left, excluded ones
            follow with that infinity as their value.
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
