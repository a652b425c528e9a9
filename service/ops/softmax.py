"""Softmax and log-softmax along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from tilewire.service.ops.op import (
    FLOATS16_32,
    Batching,
    Chunking,
    JoinStrategy,
    Op,
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


class Softmax(Op[SoftmaxOptions]):
    """out = softmax(x)."""

    name = "softmax"
    summary = "out = softmax(x) or log-softmax, along one axis."
    required = ("x",)
    options = SoftmaxOptions
    ranks = {"x": 1, "out": 1}
    example = {"x": [[1, 2, 3]], "dtype": "float32"}
    warmup = WarmupCase({}, {"x": [[0, 0], [5, 5]]}, [[[0.5, 0.5], [0.5, 0.5]]])

    def infer(self, types: Types, options: SoftmaxOptions) -> tuple[tuple[TensorType, ...], int]:
        """Infers the types of the results and the number of operations."""
        x = types["x"]
        check_axis(self.name, x, options.axis)
        out = TensorType(check_out_dtype(options.out_dtype, x.dtype, FLOATS16_32), x.shape)
        return (out,), 5 * out.num_elements

    def batching(
        self, types: Types, residents: frozenset[str], options: SoftmaxOptions, outputs: Sequence[TensorType]
    ) -> Batching[SoftmaxOptions] | None:
        """Rows of equal length."""
        x, (out,) = types["x"], outputs
        if residents or options.axis not in (-1, len(x.shape) - 1) or not x.num_elements:
            return None
        joint = msgspec.structs.replace(options, axis=-1)
        return Batching(JoinStrategy.ROWS, (options.log, x.dtype, x.shape[-1], out.dtype), joint)

    def chunking(self, types: Types, options: SoftmaxOptions, outputs: Sequence[TensorType]) -> Chunking | None:
        """Rows of a matrix."""
        return Chunking(("x",)) if len(outputs[0].shape) == 2 and options.axis in (-1, 1) else None
