"""What goes into a call and what comes out: operands, options, tensor descriptions, answers. Values only; no HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import numpy.typing as npt

from tilewire._arrays import Array

# An array, anything that np.asarray takes, or the name of a resident tensor: "@weights/w1".
Operand = npt.ArrayLike


class CallOptions(TypedDict, total=False):
    """What every op takes besides its operands and options.

    Attributes:
        timeout_ms: Milliseconds after which the server no longer starts the request.
        request_id: Echoed in the answer and written to the server's log.
        out_dtype: Dtype of the result, by name.
    """

    timeout_ms: int | None
    request_id: str | None
    out_dtype: str | None


class MatmulOptions(CallOptions, total=False):
    """Options of `matmul`.

    Attributes:
        bias: (N,), added before the activation.
        a_scale: One element or one per row of `a`, for float8 inputs.
        b_scale: One element or one per column of `b`, for float8 inputs.
        transpose_a: Swap the last two dimensions of `a`.
        transpose_b: Swap the last two dimensions of `b`.
        activation: `none`, `relu`, `leaky_relu`, `gelu`, `silu`, `sigmoid` or `tanh`.
        precision: How float32 inputs are multiplied: `ieee` (the default), `tf32` or `tf32x3`.
    """

    bias: Operand | None
    a_scale: Operand | None
    b_scale: Operand | None
    transpose_a: bool
    transpose_b: bool
    activation: str
    precision: str | None


class SoftmaxOptions(CallOptions, total=False):
    """Options of `softmax`.

    Attributes:
        axis: The axis that sums to one; the last by default.
        log: Log-softmax instead of softmax.
    """

    axis: int
    log: bool


class AddOptions(CallOptions, total=False):
    """Options of `add`.

    Attributes:
        alpha: out = a + alpha·b; 1 by default.
    """

    alpha: float


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A resident tensor, as the server describes it.

    Attributes:
        name: Without the `@`.
        shape: Its dimensions.
        dtype: Its dtype by name.
        nbytes: Its size in bytes.
        created: When it was stored, as the server writes times; None where it does not say.
        last_used: When a request last used it, likewise.
        hits: How many requests used it, likewise.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    created: str | float | None = None
    last_used: str | float | None = None
    hits: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A result and what the server says about how it came to be.

    Attributes:
        result: The array, or with `store=` the stored tensor's description.
        request_id: The server's id of the request.
        batch_size: How many requests shared the launch; None where the server does not say.
        timings_ms: Milliseconds by stage: `receive`, `queue`, `h2d`, `kernel`, `d2h`.
    """

    result: Array | TensorInfo
    request_id: str | None
    batch_size: int | None
    timings_ms: Mapping[str, float]

    @property
    def array(self) -> Array:
        """The result as an array.

        Raises:
            TypeError: The result was stored.
        """
        if isinstance(self.result, TensorInfo):
            raise TypeError(f"the result is stored as @{self.result.name}; get() fetches it")
        return self.result

    @property
    def stored(self) -> TensorInfo:
        """The description of the stored result.

        Raises:
            TypeError: The result was not stored.
        """
        if not isinstance(self.result, TensorInfo):
            raise TypeError("the result is an array: no store= was given")
        return self.result
