"""Reads nested lists of numbers. Owns the order in which they are read; no dtypes of the server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tilewire._arrays.dlpack import num_bytes_of

# NumPy's largest number of dimensions.
MAX_DEPTH = 64
# Bytes of an array that are copied while a number of a list is read, in 0.1 us.
_BYTES_OF_NUMBER = 2**8
# Numbers that are read at once, in about 0.5 ms.
_PIECE = 2**14
# Joined pieces of these dtypes are what NumPy makes of the whole list.
_PLAIN = frozenset(map(np.dtype, ("bool", "int64", "float64")))


def work_bytes_of(value: Any) -> int:
    """Returns the bytes of an array, or those that are copied in the time that a list takes to read."""
    if isinstance(value, list | tuple):
        return _count_numbers(value) * _BYTES_OF_NUMBER
    return num_bytes_of(value)


def first_lists(value: Any) -> Iterator[Sequence[Any]]:
    """Yields a list, its first row, that row's first one and so on: an end comes where a list holds itself, too."""
    for _ in range(MAX_DEPTH):
        if not isinstance(value, list | tuple):
            break
        yield value
        if not value:
            break
        value = value[0]


def _count_numbers(value: Any) -> int:
    """Returns how many numbers a list has if all its rows are as long as the first ones; 1 for what is no list."""
    return math.prod(map(len, first_lists(value)))


def read_numbers(value: Any, dtype: np.dtype[Any] | None = None) -> np.ndarray[Any, Any]:
    """Returns what `np.asarray` does, and reads long lists piece by piece.

    NumPy holds the interpreter's lock while it reads a list. Between two pieces other threads have their turn.
    """
    if _count_numbers(value) <= _PIECE:
        return np.asarray(value, dtype)
    try:
        pieces = _pieces(value, dtype)
        dtypes = {piece.dtype for piece in pieces}
        if len(dtypes) == 1 or dtypes <= _PLAIN:
            return np.concatenate(pieces)
    except ValueError:
        # Rows of unequal lengths: NumPy describes them in the whole list.
        pass
    return np.asarray(value, dtype)


def _pieces(value: Any, dtype: np.dtype[Any] | None) -> list[np.ndarray[Any, Any]]:
    rows = _PIECE // _count_numbers(value[0])
    if rows == 0:
        return [read_numbers(row, dtype)[None] for row in value]
    return [np.asarray(value[begin : begin + rows], dtype) for begin in range(0, len(value), rows)]
