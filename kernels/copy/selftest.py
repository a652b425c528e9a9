"""The self-test of copies: each binary once."""

from __future__ import annotations

import torch

from tilewire.kernels.copy import operands
from tilewire.kernels.copy.op import CopyRange, copy_ranges, variant
from tilewire.kernels.op import SelfTest


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
    return SelfTest((variant(word, has_rows),), (first_row & second_row).all())


def operands_self_test(item_bytes: int, device: torch.device) -> SelfTest:
    """Copies two operands, of which one lies the other way round."""
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[item_bytes]
    rows, columns, pitch = 40, 150, 160
    a = (torch.arange(rows * columns, device=device) % 100).to(dtype).view(rows, columns)
    # The second operand lies the other way round: its rows are columns of what is in memory.
    b = a.mT.contiguous().mT
    copies = [torch.full((rows, pitch), -1, dtype=dtype, device=device) for _ in range(2)]
    first, second = (
        operands.Copied(1, rows, columns, (0, operand.stride(0), operand.stride(1)), pitch) for operand in (a, b)
    )
    launch = operands.launch_of(first, second, item_bytes, device)
    launch(a, b, *copies)
    are_right = [(copy[:, :columns] == a).all() for copy in copies]
    return SelfTest((launch.variant,), are_right[0] & are_right[1])
