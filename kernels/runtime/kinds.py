"""Element types by name: their sizes, Triton's names, and the numbers that stand for them at run time. Pure."""

from __future__ import annotations

import functools

FLOATS = ("float16", "bfloat16", "float32")
ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_TRITON = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}
# Numbers that kernels get where the binary does not name the type: those of `kernels.runtime.elements`, 0 for no operand.
KINDS = {"": 0, "float16": 1, "bfloat16": 2, "float32": 3, "int32": 4}


@functools.cache
def name_of(dtype: object) -> str:
    """Name of a torch dtype, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def pointer(dtype: str) -> str:
    """Triton's type of a pointer to `dtype`."""
    return f"*{_TRITON[dtype]}"


def descriptor(dtype: str, box: tuple[int, ...], layout: str = "") -> str:
    """Triton's type of a tensor descriptor that moves a `box` of `dtype` at a time; in Gluon with its layout there."""
    return f"tensordesc<{_TRITON[dtype]}{list(box)}{layout and ',' + layout}>"


def block_of(kind: str) -> tuple[int, ...]:
    """The box of a type that `descriptor` gave."""
    numbers = kind[kind.index("[") + 1 : kind.index("]")]
    return tuple(map(int, numbers.split(",")))


def unit_of(dtype: str, *, is_aligned: bool) -> int:
    """Elements of 16 bytes where operands are aligned, else 1: by what kernels multiply lengths and strides."""
    return 16 // ITEM_BYTES[dtype] if is_aligned else 1
