from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import numpy as np
import pytest

from tilewire._arrays.lists import read_numbers

LONG = 40_000
LISTS: dict[str, list[Any]] = {
    "flat": [0.5] * LONG,
    "rows": [[float(row)] * 3 for row in range(LONG)],
    "long rows": [[0.25] * LONG, [2.0] * LONG],
    "tuples in a list": [(1, 2), (3, 4)] * LONG,
    "cubes": [[[1, 2], [3, 4]]] * LONG,
    "whole numbers, and a fraction at the end": [1] * LONG + [0.5],
    "booleans, and a number at the end": [True] * LONG + [7],
    "unsigned, and one below 0 at the end": [2**63] * LONG + [-1],
    "too large for any dtype": [1] * LONG + [2**70],
    "numbers of NumPy": [np.float32(1)] * LONG + [np.float16(2)],
    "arrays": [np.ones(3, np.float32)] * LONG + [np.ones(3, np.int8)],
    "texts": ["a"] * LONG + ["bcd"],
    "nothing": [],
    "rows of nothing": [[]] * LONG,
}


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("dtype", [None, "float32", "int64"])
def test_a_list_is_read_as_numpy_reads_it(kind: str, dtype: str | None) -> None:
    value, wanted = LISTS[kind], None if dtype is None else np.dtype(dtype)
    outcomes = [_outcome(read, value, wanted) for read in (read_numbers, np.asarray)]
    assert outcomes[0] == outcomes[1]


def _outcome(read: Callable[..., np.ndarray[Any, Any]], value: list[Any], dtype: np.dtype[Any] | None) -> object:
    try:
        array = read(value, dtype)
    except (ValueError, OverflowError) as error:
        return repr(error)
    return array.dtype, array.tolist()


@pytest.mark.parametrize(
    "value",
    [[[1.0, 2.0]] * LONG + [[1.0]], [1.0] * LONG + [[1.0]], [[1.0] * LONG, 2.0], [[1.0] * LONG, [1.0] * (LONG + 1)]],
)
def test_rows_of_unequal_lengths_are_refused_as_numpy_refuses_them(value: list[Any]) -> None:
    with pytest.raises(ValueError, match="inhomogeneous") as expected:
        np.asarray(value)
    with pytest.raises(ValueError, match="inhomogeneous") as raised:
        read_numbers(value)
    assert str(raised.value) == str(expected.value)


class Watched(list[Any]):
    """Notes how many elements are read at once; one that is read whole notes all."""

    def __init__(self, elements: list[Any]) -> None:
        super().__init__(elements)
        self.read: list[int] = []

    def __getitem__(self, where: SupportsIndex | slice) -> Any:
        found = super().__getitem__(where)
        if isinstance(where, slice):
            self.read.append(len(found))
        return found

    def __iter__(self) -> Iterator[Any]:
        self.read.append(len(self))
        return super().__iter__()


def test_a_long_list_is_read_in_pieces() -> None:
    """NumPy holds the interpreter's lock over a piece: 16,384 numbers are half a millisecond."""
    watched = Watched([[1.0] * 10] * LONG)
    read_numbers(watched)
    assert sum(watched.read) == LONG
    assert max(watched.read) * 10 <= 2**14
