"""Types of calls: operands, tensor descriptions, answers. Values only; no HTTP."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple

import numpy as np

from tilewire._arrays.host import Array

if TYPE_CHECKING:
    # Type checkers bring the module; Python has defaults of type variables from 3.13 on.
    from typing_extensions import TypeVar

    ArrayT = TypeVar("ArrayT", default=Any)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")

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
IfMatch = int | TensorInfo | Resident | Collection[int | TensorInfo | Resident] | Literal["*"]
# An operand that makes the answer a NumPy array: an array, a list, a number, or a resident tensor ("@weights/w1").
HostOperand = Array | np.generic | complex | str | TensorInfo | Resident | Sequence[Any]
# Also arrays of torch, JAX and CuPy, and whatever np.asarray takes: the answer then comes from the same library.
Operand = Any


class TopK(NamedTuple, Generic[ArrayT]):
    """The best elements and where they were found.

    Attributes:
        values: (…, k), best first.
        indices: (…, k), int64.
    """

    values: ArrayT
    indices: ArrayT


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
