"""The self-test of copies: each binary once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from tilewire.kernels.copy.op import WORDS, Stretch, copy_stretches, variant
from tilewire.kernels.op import Trial
from tilewire.kernels.runtime.targets import Target


def trials(_target: Target, device: torch.device) -> Iterator[Callable[[], Trial]]:
    """Yields one call for each binary of a target, which launches and checks it."""
    for word, has_rows in itertools.product(WORDS, (False, True)):
        yield functools.partial(_trial, word, device, has_rows=has_rows)


def _trial(word: int, device: torch.device, *, has_rows: bool) -> Trial:
    source = torch.arange(256, dtype=torch.uint8, device=device)
    copied = torch.zeros(512, dtype=torch.uint8, device=device)
    row = 8 * word
    rows = (row, row, 2 * row) if has_rows else ()
    table = copy_stretches([Stretch(source.data_ptr() + word, copied.data_ptr() + word, 2 * row, *rows)], device)
    assert table is not None, "This is a bug."
    second = word + (2 * row if has_rows else row)
    first_row = copied[word : word + row] == source[word : word + row]
    second_row = copied[second : second + row] == source[word + row : word + 2 * row]
    return Trial((variant(word, has_rows),), (first_row & second_row).all())
