"""Names of dtypes: what a user may write, which one a call gets, and its NumPy form. Holds no array data."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np

# safetensors' codes. Also dtypes that the service refuses: its words are better than a cast behind the user's back.
CODES = {
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
FLOATS = ("float16", "bfloat16", "float32")
# Dtypes that each op takes.
DTYPES = {
    "matmul": (*FLOATS, "int8", "float8_e4m3fn", "float8_e5m2"),
    "softmax": FLOATS,
    "add": (*FLOATS, "float64", "int32", "int64"),
    "search": (*FLOATS, "int8"),
    "topk": FLOATS,
    "reduce": FLOATS,
    "normalize": FLOATS,
    "pointwise": FLOATS,
}
# Outputs of the ops that have several, each with its dtype; None stands for that of the first operand.
OUTPUTS: dict[str, dict[str, str | None]] = {
    "search": {"values": "float32", "indices": "int64"},
    "topk": {"values": None, "indices": "int64"},
}
# Dtypes of the service: those that some op takes.
_SERVED = tuple(dict.fromkeys(name for names in DTYPES.values() for name in names))
NAMES = {code: name for name, code in CODES.items()}
# Dtypes that NumPy lacks, with the unsigned integers that have their bits. `ml_dtypes` makes them NumPy dtypes.
EXTENSIONS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "float8_e5m2": np.dtype("u1"),
}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def dtype_name(dtype: object, argument: str) -> str:
    """Converts what a user writes for a dtype to its name.

    Args:
        dtype: A name, `bfloat16` and float8 among them; anything that `np.dtype` takes; or a dtype of torch, JAX or CuPy.
        argument: Argument that errors begin with.

    Raises:
        TypeError: Not a dtype, or one without a name in the protocol.
    """
    # torch's dtypes are no NumPy dtypes, but they print as "torch.float32".
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name in CODES:
        return name
    try:
        name = np.dtype(dtype).name  # type: ignore[call-overload]
    except TypeError:
        name = ""
    if name not in CODES:
        raise TypeError(f"{argument}: {dtype!r} is no dtype that can be sent; expected one of {', '.join(_SERVED)}")
    return str(name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name.

    Raises:
        ImportError: bfloat16 or float8, and `ml_dtypes` is not installed.
    """
    if name not in EXTENSIONS:
        return np.dtype(name)
    try:
        extension = importlib.import_module("ml_dtypes")
    except ImportError:
        raise ImportError(f"{name} arrays need ml_dtypes: pip install ml_dtypes, or choose another out_dtype") from None
    dtype: np.dtype[Any] = np.dtype(getattr(extension, name))
    return dtype


def promote(names: Iterable[str]) -> str:
    """Returns the dtype that holds all of these, as NumPy 2 promotes; bfloat16 and float8 as `ml_dtypes` does.

    Raises:
        TypeError: Two float8 dtypes, or float8 beside integers: nothing holds both.
    """
    found = set(names)
    if len(found) == 1:
        return found.pop()
    extended = found & EXTENSIONS.keys()
    plain = found - extended
    common = np.result_type(*(np.dtype(name) for name in plain)) if plain else None
    if not extended:
        assert common is not None, "This is a bug."
        return common.name
    if len(extended & set(_FLOAT8)) > 1 or (common is not None and common.kind not in "fb" and "bfloat16" not in found):
        raise TypeError(f"no dtype holds {' and '.join(sorted(found))}; convert one of them first")
    if common is not None and common.kind in "iu":
        # As float16 beside integers: two bytes of them take more than it holds.
        wide = np.result_type(common, np.float16).name
        return "bfloat16" if wide == "float16" else wide
    if common is None or common.kind != "f":
        return "bfloat16" if "bfloat16" in extended else extended.pop()
    return "float32" if "bfloat16" in extended and common.name == "float16" else common.name


def promote_number(name: str, number: bool | float) -> str:
    """Returns the dtype of an array with a Python number: the array's own, unless its kind cannot hold the number."""
    if name in EXTENSIONS:
        return name
    return np.result_type(np.dtype(name), number).name
