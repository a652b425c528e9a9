"""Layer, RMS and 2-norm normalisation along one axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    check_out_dtype,
    check_required,
    check_vector,
)

NormalizeKind = Literal["layer", "rms", "l2"]

DEFAULT_EPS: Mapping[str, float] = {"layer": 1e-5, "rms": 1e-6, "l2": 1e-12}


class NormalizeOptions(OpOptions, frozen=True, tag="normalize"):
    """Options of `normalize`."""

    kind: Annotated[
        NormalizeKind | None,
        msgspec.Meta(description="Over √(variance + eps) less the mean, √(mean square + eps), or max(2-norm, eps)."),
    ] = None
    axis: Annotated[int, msgspec.Meta(description="The axis that is normalised.")] = -1
    eps: Annotated[
        float | None, msgspec.Meta(description="1e-5 for `layer`, 1e-6 for `rms`, 1e-12 for `l2` by default.")
    ] = None
    out_dtype: Annotated[OutDType | None, msgspec.Meta(description="Dtype of the result.")] = None


class Normalize(AxisOp):
    """out = normalised x · weight + bias."""

    name = "normalize"
    summary = "out = x normalised along one axis, times weight, plus bias."
    optional = ("weight", "bias")
    options = NormalizeOptions
    needs = ("kind",)
    ranks = {"x": 2, "out": 2}
    example = {"x": [[1, 2, 3]], "dtype": "float32"}
    example_options = {"kind": "l2"}
    warmup = WarmupCase({"kind": "l2"}, {"x": [[0, 2], [0, -4]]}, [[[0, 1], [0, -1]]])

    def infer(self, types: Types, options: NormalizeOptions) -> tuple[tuple[TensorType, ...], int]:
        check_required(self, options)
        x = types["x"]
        n = x.shape[check_axis(self.name, x, options.axis)]
        if options.eps is not None and not (0 <= options.eps < math.inf):
            raise InvalidRequest(f"eps: {options.eps}; expected a finite number, 0 or more")
        for name in self.optional:
            check_vector(name, types, n)
        out = TensorType(check_out_dtype(options.out_dtype, x.dtype, FLOATS16_32), x.shape)
        return (out,), 8 * out.num_elements
