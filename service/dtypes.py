"""The dtypes that Tilewire serves and their names in each format. A table."""

from __future__ import annotations

from dataclasses import dataclass

from tilewire.service.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: Our name, which is torch's: `float16`, `float8_e4m3fn`, …
        itemsize: Bytes per element.
        safetensors: Code in a safetensors header.
        oip: Datatype of the Open Inference Protocol.
        npy: NumPy's descriptor, or None where NumPy has no such type.
        is_float: Floating point rather than integer.
    """

    name: str
    itemsize: int
    safetensors: str
    oip: str
    npy: str | None
    is_float: bool


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("float16", 2, "F16", "FP16", "<f2", True),
        DType("bfloat16", 2, "BF16", "BF16", None, True),
        DType("float32", 4, "F32", "FP32", "<f4", True),
        DType("float64", 8, "F64", "FP64", "<f8", True),
        DType("int8", 1, "I8", "INT8", "|i1", False),
        DType("int32", 4, "I32", "INT32", "<i4", False),
        DType("int64", 8, "I64", "INT64", "<i8", False),
        DType("float8_e4m3fn", 1, "F8_E4M3", "FP8_E4M3", None, True),
        DType("float8_e5m2", 1, "F8_E5M2", "FP8_E5M2", None, True),
    )
}

BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES.values()}
BY_OIP = {dtype.oip: dtype for dtype in DTYPES.values()}
BY_NPY = {dtype.npy: dtype for dtype in DTYPES.values() if dtype.npy is not None}


def dtype_named(name: str, *, field: str) -> DType:
    """Looks a dtype up by our name.

    Raises:
        InvalidRequest: No such dtype; the detail names `field`.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise InvalidRequest(f"{field}: unknown dtype {name[:64]!r}; expected one of {', '.join(DTYPES)}")
    return dtype
