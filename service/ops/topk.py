"""The k largest or smallest elements along one axis, and where they are."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tilewire.service.ops.op import (
    AxisOp,
    OpOptions,
    Selection,
    Sharding,
    TensorType,
    Types,
    WarmupCase,
    check_axis,
    check_k,
    check_required,
)


class TopkOptions(OpOptions, frozen=True, tag="topk"):
    """Options of `topk`."""

    k: Annotated[int | None, msgspec.Meta(description="How many, 1 or more and no more than there are.")] = None
    axis: Annotated[int, msgspec.Meta(description="The axis along which elements are compared.")] = -1
    largest: Annotated[bool, msgspec.Meta(description="The largest ones; else the smallest.")] = True


class Topk(AxisOp):
    """values, indices = the k largest or smallest elements of x."""

    name = "topk"
    summary = "values, indices = the k largest or smallest elements along one axis, best first."
    outputs = ("values", "indices")
    options = TopkOptions
    needs = ("k",)
    ranks = {"x": 2, "values": 2, "indices": 2}
    output_datatypes = {"indices": "INT64"}
    example = {"x": [[1, 3, 2]], "dtype": "float32"}
    example_options = {"k": 2}
    warmup = WarmupCase({"k": 2}, {"x": [[1, 3, 2], [5, 4, 5]]}, [[[3, 2], [5, 5]], [[1, 2], [0, 2]]])

    def infer(self, types: Types, options: TopkOptions) -> tuple[tuple[TensorType, ...], int]:
        check_required(self, options)
        x = types["x"]
        axis = check_axis(self.name, x, options.axis)
        k = check_k(options.k, "x", x.shape[axis])
        shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
        return (TensorType(x.dtype, shape), TensorType("int64", shape)), x.num_elements

    def sharding(self, types: Types, options: TopkOptions) -> Sharding | None:
        """Elements of each row; the best of all parts are the best."""
        assert options.k is not None, "This is a bug: planned without k."
        if options.axis not in (-1, len(types["x"].shape) - 1):
            return None
        return Sharding("x", {"x": -1}, Selection(options.k, options.largest, is_nan_large=True))
