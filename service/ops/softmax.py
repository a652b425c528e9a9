"""Softmax and log-softmax along one axis."""

from __future__ import annotations

from typing import Annotated

import msgspec

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
)


class SoftmaxOptions(OpOptions, frozen=True, tag="softmax"):
    """Options of `softmax`."""

    axis: Annotated[int, msgspec.Meta(description="The axis that sums to one.")] = -1
    out_dtype: Annotated[OutDType | None, msgspec.Meta(description="Dtype of the result.")] = None
    log: Annotated[bool, msgspec.Meta(description="Log-softmax instead of softmax.")] = False


class Softmax(AxisOp):
    """out = softmax(x)."""

    name = "softmax"
    summary = "out = softmax(x) or log-softmax, along one axis."
    options = SoftmaxOptions
    ranks = {"x": 1, "out": 1}
    example = {"x": [[1, 2, 3]], "dtype": "float32"}
    warmup = WarmupCase({}, {"x": [[0, 0], [5, 5]]}, [[[0.5, 0.5], [0.5, 0.5]]])

    def infer(self, types: Types, options: SoftmaxOptions) -> tuple[tuple[TensorType, ...], int]:
        x = types["x"]
        check_axis(self.name, x, options.axis)
        out = TensorType(check_out_dtype(options.out_dtype, x.dtype, FLOATS16_32), x.shape)
        return (out,), 5 * out.num_elements
