"""Scaled sums with NumPy's broadcasting."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import InvalidRequest
from tilewire.service.ops.op import (
    FLOATS16_32,
    ElementwiseOp,
    OpOptions,
    OutDType,
    TensorType,
    Types,
    WarmupCase,
    broadcast_shapes,
    check_out_dtype,
    check_same_dtype,
)


class AddOptions(OpOptions, frozen=True, tag="add"):
    """Options of `add`."""

    alpha: Annotated[int | float, msgspec.Meta(description="out = a + alpha·b.")] = 1
    out_dtype: Annotated[OutDType | None, msgspec.Meta(description="Dtype of the result.")] = None

    def __post_init__(self) -> None:
        """Refuses an integer that does not fit 64 bits.

        Raises:
            ValueError: An integer that does not fit 64 bits.
        """
        if isinstance(self.alpha, int) and not -(2**63) <= self.alpha < 2**63:
            raise ValueError("expected 64 bits, or an exponent")


class Add(ElementwiseOp):
    """out = a + alpha·b."""

    name = "add"
    summary = "out = a + alpha·b, with NumPy broadcasting."
    required = ("a", "b")
    dtypes = (*FLOATS16_32, "float64", "int32", "int64")
    options = AddOptions
    ranks = {"a": 1, "b": 1, "out": 1}
    example = {"a": [[1, 2]], "b": [[10, 20]], "dtype": "float32"}
    warmup = WarmupCase({"alpha": 2}, {"a": [[1, 2]], "b": [[10, 20]]}, [[[21, 42]]])

    def infer(self, types: Types, options: AddOptions) -> tuple[tuple[TensorType, ...], int]:
        dtype = check_same_dtype(types)
        is_float = DTYPES[dtype].is_float
        if not is_float and not isinstance(options.alpha, int):
            raise InvalidRequest(f"alpha: {options.alpha} must be an integer for {dtype}")
        allowed = (*FLOATS16_32, "float64") if is_float else ("int32", "int64", "float32", "float64")
        shape = broadcast_shapes(types["a"].shape, types["b"].shape, "dimensions")
        out = TensorType(check_out_dtype(options.out_dtype, dtype, allowed), shape)
        return (out,), (1 if options.alpha == 1 else 2) * out.num_elements
