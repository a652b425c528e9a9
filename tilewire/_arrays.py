"""NumPy arrays to safetensors bytes and back. Owns the dtype codes; knows no HTTP.

bfloat16 and float8 arrays have the dtypes of `ml_dtypes`, which is imported only when an answer holds one.

Source: the format as documented at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CONTENT_TYPE = "application/x-safetensors"
_PREFIX_BYTES = 8
# Also dtypes that the server refuses: it says what it takes, and a cast behind the user's back would be worse.
_CODES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}


def to_safetensors(tensors: Mapping[str, Array]) -> tuple[bytes | memoryview, ...]:
    """Writes tensors as one header and a view of each array; contiguous arrays are not copied.

    Args:
        tensors: Arrays by name, of any layout and byte order.

    Raises:
        TypeError: An array whose dtype has no safetensors form, e.g. objects or strings.
    """
    header: dict[str, object] = {}
    views: list[bytes | memoryview] = []
    end = 0
    # Wider elements first, so that every tensor starts aligned to its own.
    for name, array in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        code = _CODES.get(array.dtype.name)
        if code is None:
            raise TypeError(f"{name}: dtype {array.dtype} cannot be sent; expected one of {', '.join(_CODES)}")
        view = _bytes_of(array)
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": (end, end + view.nbytes)}
        views.append(view)
        end += view.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text, *views


def from_safetensors(body: bytearray) -> dict[str, Array]:
    """Reads tensors as writable views of `body`.

    Raises:
        ImportError: A bfloat16 or float8 tensor, and `ml_dtypes` is not installed.
        ValueError: Not safetensors.
    """
    start = _PREFIX_BYTES + int.from_bytes(body[:_PREFIX_BYTES], "little")
    if start > len(body):
        raise ValueError("not safetensors: the header is longer than the body")
    header = json.loads(body[_PREFIX_BYTES:start])
    header.pop("__metadata__", None)
    return {name: _array_at(body, start, entry) for name, entry in header.items()}


def _bytes_of(array: Array) -> memoryview:
    little = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    # NumPy cannot export an ml_dtypes array as a buffer, but its bytes it can.
    flat: Any = little.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _array_at(body: bytearray, start: int, entry: Mapping[str, Any]) -> Array:
    dtype, shape = _dtype_of(entry["dtype"]), tuple(entry["shape"])
    flat = np.frombuffer(
        body, dtype=np.uint8, count=math.prod(shape) * dtype.itemsize, offset=_begin(start, entry, body)
    )
    return flat.view(dtype).reshape(shape)


def _begin(start: int, entry: Mapping[str, Any], body: bytearray) -> int:
    # NumPy refuses an offset at the very end, where the bytes of an empty tensor lie.
    begin: int = start + entry["data_offsets"][0]
    return 0 if begin == len(body) and 0 in entry["shape"] else begin


def _dtype_of(code: str) -> np.dtype[Any]:
    name = _NAMES[code]
    if not name.startswith(("bfloat", "float8")):
        return np.dtype(name)
    try:
        extension = importlib.import_module("ml_dtypes")
    except ImportError:
        raise ImportError(
            f"{name} arrays need ml_dtypes: pip install ml_dtypes, or ask for another out_dtype"
        ) from None
    dtype: np.dtype[Any] = np.dtype(getattr(extension, name))
    return dtype
