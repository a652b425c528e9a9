"""Host arrays to safetensors bytes and back. Holds the formats of a body; no HTTP.

bfloat16 and float8 arrays have the dtypes of `ml_dtypes`, which is imported only when a NumPy answer holds one.

Source: the format as documented at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewire._arrays.dlpack import from_foreign, is_foreign, to_foreign
from tilewire._arrays.dtypes import CODES, EXTENSIONS, NAMES, numpy_dtype
from tilewire._arrays.lists import MAX_DEPTH, first_lists, read_numbers

Array = npt.NDArray[Any]

CONTENT_TYPE = "application/x-safetensors"
_PREFIX_BYTES = 8
# What masked elements can be in.
_NESTED = (list, tuple, np.ma.MaskedArray)


@dataclass(frozen=True, slots=True)
class HostArray:
    """One array in this process's memory.

    Attributes:
        dtype: Name of its dtype.
        data: Elements in this machine's byte order; of bfloat16 and float8 their bits, as unsigned integers.
    """

    dtype: str
    data: Array

    @classmethod
    def of(cls, value: Any) -> HostArray:
        """Views an array of NumPy or of a library that speaks DLPack; anything else becomes a NumPy array.

        Raises:
            TypeError: A dtype that cannot be sent, or masked elements.
        """
        refuse_unreadable(value)
        if is_foreign(value):
            return cls(*from_foreign(value))
        try:
            array = read_numbers(value)
        except (RuntimeError, TypeError) as error:
            if not any(is_foreign(one) for rows in first_lists(value) for one in rows[:1]):
                raise
            raise TypeError(
                f"NumPy cannot read these arrays in a list ({error}); join them, as by torch.stack"
            ) from error
        name = array.dtype.name
        if array.dtype == object:
            raise TypeError(
                f"dtype object cannot be sent, as NumPy makes of this {type(value).__name__}; expected numbers"
            )
        if name not in CODES:
            raise TypeError(f"dtype {array.dtype} cannot be sent; expected one of {', '.join(CODES)}")
        if not array.dtype.isnative:
            # Names of constants and blocks are digests of bytes: the same bytes in another order are other elements.
            array = array.astype(array.dtype.newbyteorder("="))
        return cls(name, array.view(EXTENSIONS[name]) if name in EXTENSIONS else array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes in C order."""
        return self.data.nbytes

    def astype(self, name: str) -> HostArray:
        """Converts the elements; a view where they have that dtype already."""
        if name == self.dtype:
            return self
        converted = self.numpy().astype(numpy_dtype(name))
        return HostArray(name, converted.view(EXTENSIONS[name]) if name in EXTENSIONS else converted)

    def numpy(self) -> Array:
        """Returns the NumPy array.

        Raises:
            ImportError: bfloat16 or float8, and `ml_dtypes` is not installed.
        """
        return self.data.view(numpy_dtype(self.dtype)) if self.dtype in EXTENSIONS else self.data

    def like(self, other: Any) -> Any:
        """Returns the array of the library that `other` came from; NumPy's where it is None."""
        return self.numpy() if other is None else to_foreign(self.dtype, self.data, other)


def refuse_unreadable(value: Any, depth: int = 0) -> None:
    """Refuses masked elements, of arrays in lists too, whose mask NumPy would drop, and lists without an end.

    Args:
        value: An operand, or a part of one.
        depth: Number of lists that the part is in.

    Raises:
        TypeError: There are some.
    """
    if depth >= MAX_DEPTH and isinstance(value, list | tuple):
        raise TypeError(f"lists in lists more than {MAX_DEPTH} deep, as a list that holds itself, are no array")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError("a masked array loses its mask; fill it, as x.filled(0)")
    if isinstance(value, list | tuple) and any(issubclass(kind, _NESTED) for kind in set(map(type, value))):
        for one in value:
            refuse_unreadable(one, depth + 1)


def to_safetensors(
    tensors: Mapping[str, HostArray], metadata: Mapping[str, str] | None = None
) -> tuple[bytes | memoryview, ...]:
    """Writes tensors as one header and a view of each array; one that does not lie in C order is copied.

    Args:
        tensors: Arrays by name, of any layout and byte order.
        metadata: Texts for the header's `__metadata__`.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    views: list[bytes | memoryview] = []
    end = 0
    # Wider elements first, so that every tensor starts aligned to its own.
    for name, array in sorted(tensors.items(), key=lambda item: -item[1].data.itemsize):
        view = _view_of(array.data)
        header[name] = {
            "dtype": CODES[array.dtype],
            "shape": array.shape,
            "data_offsets": (end, end + view.nbytes),
        }
        views.append(view)
        end += view.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text, *views


def from_safetensors(body: memoryview | bytearray) -> dict[str, HostArray]:
    """Reads tensors as views of `body`, writable where it is.

    Raises:
        ValueError: Not safetensors.
    """
    start = _PREFIX_BYTES + int.from_bytes(body[:_PREFIX_BYTES], "little")
    if start > len(body):
        raise ValueError("not safetensors: the header is longer than the body")
    try:
        header = json.loads(bytes(body[_PREFIX_BYTES:start]))
        header.pop("__metadata__", None)
        return {name: _array_at(body, start, name, entry) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not safetensors: its header is not understood ({error!r})") from error


def _view_of(array: Array) -> memoryview:
    little: Any = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return memoryview(little.reshape(-1).view(np.uint8))


def _array_at(body: memoryview | bytearray, start: int, tensor: str, entry: Mapping[str, Any]) -> HostArray:
    code, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if code not in NAMES:
        raise ValueError(f"{tensor}: dtype {code} is none that this client knows; it knows {', '.join(NAMES)}")
    name = NAMES[code]
    dtype = EXTENSIONS.get(name) or np.dtype(name)
    count = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or last - first != count:
        raise ValueError(f"not safetensors: {tensor}: its data_offsets do not span its shape")
    # NumPy refuses an offset at the very end, where the bytes of an empty tensor lie.
    begin = start + first if count else 0
    flat = np.frombuffer(body, dtype=np.uint8, count=count, offset=begin)
    return HostArray(name, flat.view(dtype).reshape(shape))
