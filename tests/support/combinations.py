"""Combinations of parameters of which `make test` runs few."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def sampled(*axes: Sequence[object]) -> list[Any]:
    """All combinations, as parameters of tests; slow but for as many as show each value at least once.

    Args:
        axes: Values of each parameter.
    """
    fast = {tuple(turn % len(axis) for axis in axes) for turn in range(max(map(len, axes)))}
    return [
        pytest.param(*(axis[one] for axis, one in zip(axes, places, strict=True)), marks=_slow(places not in fast))
        for places in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def sampled_lengths(longest: int) -> list[Any]:
    """Lengths from 1 on, as parameters of tests; slow but for the least, and powers of two with their neighbours."""
    fast = {*range(10), *(2**power + near for power in range(longest.bit_length()) for near in (-1, 0, 1))}
    return [pytest.param(n, marks=_slow(n not in fast)) for n in range(1, longest + 1)]


def _slow(is_slow: bool) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow,) if is_slow else ()
