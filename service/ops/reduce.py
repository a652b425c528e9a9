"""Sums, extrema and norms along one axis or over all elements."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from tilewire.service.errors import InvalidRequest
from tilewire.service.ops.op import (
    FLOATS16_32,
    AxisOp,
    OpOptions,
    OutDType,
    TensorType,
    Types,
    WarmupCase,
    check_axis,
    check_counts,
    check_out_dtype,
    check_required,
)

ReduceKind = Literal["sum", "mean", "max", "min", "argmax", "argmin", "logsumexp", "norm"]

# Of no element, these are not defined.
_EXTREMA = ("max", "min", "argmax", "argmin")
_INDICES = ("argmax", "argmin")


class ReduceOptions(OpOptions, frozen=True, tag="reduce"):
    """Options of `reduce`."""

    kind: Annotated[ReduceKind | None, msgspec.Meta(description="`norm` is the 2-norm.")] = None
    axis: Annotated[int | Literal["all"], msgspec.Meta(description="The axis that is reduced, or `all`.")] = -1
    keepdims: Annotated[bool, msgspec.Meta(description="Keep the reduced axes with length 1.")] = False
    out_dtype: Annotated[
        OutDType | None, msgspec.Meta(description="Dtype of the result; that of `argmax` and `argmin` is int64.")
    ] = None


class Reduce(AxisOp):
    """out = the sum, mean, maximum … of x."""

    name = "reduce"
    summary = "out = sum, mean, max, min, argmax, argmin, logsumexp or 2-norm of x along one axis or over all."
    options = ReduceOptions
    needs = ("kind",)
    ranks = {"x": 2, "out": 1}
    example = {"x": [[1, 2, 3]], "dtype": "float32"}
    example_options = {"kind": "sum"}
    warmup = WarmupCase({"kind": "sum"}, {"x": [[1, 2], [3, -5]]}, [[3, -2]])

    def infer(self, types: Types, options: ReduceOptions) -> tuple[tuple[TensorType, ...], int]:
        check_required(self, options)
        x = types["x"]
        axis = check_axis(self.name, x, -1 if isinstance(options.axis, str) else options.axis)
        axes = range(len(x.shape)) if options.axis == "all" else (axis,)
        if options.axis == "all":
            check_counts("x", elements=x.num_elements)
        if options.kind in _EXTREMA and math.prod(x.shape[one] for one in axes) == 0:
            raise InvalidRequest(f"x: {options.kind} of no element is not defined; its shape is {list(x.shape)}")
        kept = [(dim, number in axes) for number, dim in enumerate(x.shape)]
        if options.keepdims:
            shape = tuple(1 if is_reduced else dim for dim, is_reduced in kept)
        else:
            shape = tuple(dim for dim, is_reduced in kept if not is_reduced)
        default, allowed = ("int64", ("int64",)) if options.kind in _INDICES else (x.dtype, FLOATS16_32)
        out = TensorType(check_out_dtype(options.out_dtype, default, allowed), shape)
        # Rows without elements have results, too.
        check_counts("x", rows=out.num_elements)
        return (out,), 2 * x.num_elements
