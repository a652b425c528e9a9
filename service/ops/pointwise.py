"""Functions of each element, and of two elements with NumPy's broadcasting."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

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
    check_required,
)

Binary = Literal["mul", "sub", "div", "maximum", "minimum"]
Unary = Literal["exp", "log", "sqrt", "rsqrt", "abs", "neg", "relu", "gelu", "silu", "sigmoid", "tanh"]
Fn = Literal[Binary, Unary]
BINARY: tuple[Binary, ...] = get_args(Binary)


class PointwiseOptions(OpOptions, frozen=True, tag="pointwise"):
    """Options of `pointwise`."""

    fn: Annotated[Fn | None, msgspec.Meta(description=f"With `y`: {', '.join(BINARY)}; without: the others.")] = None
    scale: Annotated[float, msgspec.Meta(description="out = fn·scale + shift.")] = 1.0
    shift: Annotated[float, msgspec.Meta(description="out = fn·scale + shift; a zero changes nothing.")] = 0.0
    out_dtype: Annotated[OutDType | None, msgspec.Meta(description="Dtype of the result.")] = None


class Pointwise(ElementwiseOp):
    """out = fn(x)·scale + shift, or fn(x, y)·scale + shift."""

    name = "pointwise"
    summary = "out = fn(x)·scale + shift, or fn(x, y)·scale + shift with NumPy broadcasting."
    required = ("x",)
    optional = ("y",)
    options = PointwiseOptions
    needs = ("fn",)
    ranks = {"x": 1, "out": 1}
    example = {"x": [[1, 2]], "dtype": "float32"}
    example_options = {"fn": "exp"}
    warmup = WarmupCase(
        {"fn": "mul", "scale": 2, "shift": 1}, {"x": [[1, 2]], "y": [[3], [-4]]}, [[[7, 13], [-7, -15]]]
    )

    def infer(self, types: Types, options: PointwiseOptions) -> tuple[tuple[TensorType, ...], int]:
        check_required(self, options)
        x, y = types["x"], types.get("y")
        if (y is not None) != (options.fn in BINARY):
            word = "needs this input" if y is None else "does not take this input"
            raise InvalidRequest(f"y: {options.fn} {word}; with y are {', '.join(BINARY)}")
        if y is not None and y.dtype != x.dtype:
            raise InvalidRequest(f"y: dtype {y.dtype} differs from that of x, {x.dtype}; both must be the same")
        shape = x.shape if y is None else broadcast_shapes(x.shape, y.shape, "dimensions", ("x", "y"))
        out = TensorType(check_out_dtype(options.out_dtype, x.dtype, FLOATS16_32), shape)
        return (out,), (1 if (options.scale, options.shift) == (1, 0) else 3) * out.num_elements
