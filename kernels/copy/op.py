"""Many ranges of memory in one launch: once (`copy_ranges`), or again and again (`CopyPlan`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl

from tilewire.kernels.copy.kernel import copy_ranges_kernel
from tilewire.kernels.op import SelfTest
from tilewire.kernels.runtime.launch import Launch, LaunchCache, Variant

# By bytes of a word: what a thread moves at once.
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
BLOCK = 1024
COLUMNS = 6


class CopyRange(NamedTuple):
    """Bytes to copy; a row of the table, in bytes.

    Attributes:
        source: Address of the first byte read.
        destination: Address of the first byte written.
        nbytes: To copy, padding not counted.
        row_bytes: Bytes of a row when one side's rows are padded, else 0.
        pitch_from: Bytes from row to row at the source.
        pitch_to: Bytes from row to row at the destination.
    """

    source: int
    destination: int
    nbytes: int
    row_bytes: int = 0
    pitch_from: int = 0
    pitch_to: int = 0


def word_bytes(table: np.ndarray) -> int:
    """The widest word that divides every address, length, row and pitch of ranges, a row each: 8, 4, 2 or 1 bytes."""
    alignment = int(np.bitwise_or.reduce(table, axis=None))
    return next(size for size in WORDS if alignment % size == 0)


def copy_ranges(ranges: Sequence[CopyRange], device: torch.device) -> torch.Tensor | None:
    """Copies every range in one launch, on the current stream.

    Args:
        ranges: On the device, or in host memory that is registered with the driver; alive until the launch has run.
        device: The GPU; or the CPU, in the interpreter.

    Returns:
        The table that the launch reads over the bus: hold it until the launch has run. None when there was nothing to copy.
    """
    laid = _lay_out(ranges)
    if laid is None:
        return None
    table = torch.from_numpy(laid.rows)
    if device.type != "cpu":
        table = torch.empty(table.shape, dtype=torch.int64, pin_memory=True).copy_(table)
    _launch(laid.word, laid.has_rows, laid.grid, device)(table)
    return table


class CopyPlan:
    """The same ranges again and again, in one launch, to or from places in host memory that change.

    Not for several threads at once, and not again before the launch has run: both would change the table under it.

    Args:
        ranges: At least one byte; the addresses on the host are given with each launch, and are 0 here.
        device: The GPU; or the CPU, in the interpreter.
        is_gather: The host is where the ranges come from; else where they go.

    Attributes:
        word: Bytes that a thread moves at once: every address on the host must be a multiple.
    """

    def __init__(self, ranges: Sequence[CopyRange], device: torch.device, *, is_gather: bool) -> None:
        laid = _lay_out(ranges)
        assert laid is not None, "This is a bug: nothing to copy."
        self.word = laid.word
        self._table = torch.from_numpy(laid.rows)
        if device.type != "cpu":
            self._table = self._table.pin_memory()
        self._places = self._table.numpy()[:, 0 if is_gather else 1]
        self._device = device
        self._blocks = laid.grid[0]
        self._has_rows = laid.has_rows

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream the first ranges, with the address on the host of each, in order."""
        count = len(addresses)
        self._places[:count] = addresses
        _launch(self.word, self._has_rows, (self._blocks, count, 1), self._device)(self._table)


class _Laid(NamedTuple):
    """Ranges as the kernel reads them: its table, in words, and what the binary and the grid depend on."""

    rows: np.ndarray
    word: int
    has_rows: bool
    grid: tuple[int, int, int]


def _lay_out(ranges: Sequence[CopyRange]) -> _Laid | None:
    """The table; None when there is nothing to copy."""
    # All at once: there may be hundreds of ranges, and this thread also launches.
    flat = itertools.chain.from_iterable(ranges)
    rows = np.fromiter(flat, np.int64, len(ranges) * COLUMNS).reshape(-1, COLUMNS)
    nbytes, row_bytes = rows[:, 2], rows[:, 3]
    longest = int(nbytes.max(initial=0))
    if not longest:
        return None
    word = word_bytes(rows)
    has_rows = bool(row_bytes.any())
    if has_rows:
        # Without padding the whole range is one row.
        row_bytes[:] = np.where(row_bytes, row_bytes, np.maximum(nbytes, word))
    rows[:, 2:] //= word
    # Blocks in powers of two: a prepared launch is bound to its grid, and few of them should serve all lengths.
    blocks = 1 << (-(-longest // (word * BLOCK)) - 1).bit_length()
    return _Laid(rows, word, has_rows, (blocks, len(rows), 1))


_launches: LaunchCache[Launch] = LaunchCache()


def _launch(word: int, has_rows: bool, grid: tuple[int, int, int], device: torch.device) -> Launch:
    return _launches.get((word, has_rows, grid, device), lambda: Launch(variant(word, has_rows), grid, {}, device))


def variant(word: int, has_rows: bool) -> Variant:
    """The binary for words of `word` bytes."""
    constants = {"WORD": WORDS[word], "HAS_ROWS": has_rows, "COLUMNS": COLUMNS, "BLOCK": BLOCK}
    return Variant(
        copy_ranges_kernel, (("table_ptr", "*i64"),), tuple(constants.items()), ("table_ptr",), (("num_warps", 4),)
    )


def self_test(word: int, has_rows: bool, device: torch.device) -> SelfTest:
    """Copies two rows from and to any address."""
    source = torch.arange(256, dtype=torch.uint8, device=device)
    copied = torch.zeros(512, dtype=torch.uint8, device=device)
    row = 8 * word
    rows = (row, row, 2 * row) if has_rows else ()
    table = copy_ranges([CopyRange(source.data_ptr() + word, copied.data_ptr() + word, 2 * row, *rows)], device)
    assert table is not None, "This is a bug."
    second = word + (2 * row if has_rows else row)
    first_row = copied[word : word + row] == source[word : word + row]
    second_row = copied[second : second + row] == source[word + row : word + 2 * row]
    return SelfTest((variant(word, has_rows),), (first_row & second_row).all(), table)
