"""Which few of many options to keep so that the least is lost. Pure: knows neither kernels nor tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
C = TypeVar("C")
# Gains below this are noise: what was chosen before stays.
LEAST_GAIN = 0.001
# One more option is worth less, but it may serve sizes that were not measured.
_LEAST_STEP = 0.0003


def keep_few(
    options: Sequence[T], loss: Callable[[tuple[T, ...]], float], most: int, start: tuple[T, ...] = ()
) -> tuple[T, ...]:
    """Up to `most` options with the least `loss` that adding, and then exchanging, one at a time finds.

    Args:
        options: what there is.
        loss: of a set; may be `inf` for one that will not do.
        most: how many, those of `start` included.
        start: kept in any case.
    """
    kept, best = start, loss(start) if start else math.inf
    while len(kept) < most:
        trial, least = _least(((*kept, option) for option in options if option not in kept), loss)
        if trial is None or (math.isfinite(best) and least > best * (1 - _LEAST_STEP)):
            break
        kept, best = trial, least
    for place in range(len(start), len(kept)):
        rest = (*kept[:place], *kept[place + 1 :])
        trial, least = _least(((*rest, option) for option in options if option not in kept), loss)
        if trial is not None and least < best * (1 - _LEAST_STEP):
            kept, best = (*trial[:place], trial[-1], *trial[place:-1]), least
    return kept


def _least(trials: object, loss: Callable[[tuple[T, ...]], float]) -> tuple[tuple[T, ...] | None, float]:
    best: tuple[T, ...] | None = None
    least = math.inf
    for trial in trials:  # type: ignore[attr-defined]
        found = loss(trial)
        if best is None or found < least:
            best, least = trial, found
    return best, least


def relative(times: Mapping[C, float], chosen: C | None) -> float:
    """How many times the fastest's time `chosen` takes; what was not measured counts as the slowest that was."""
    slowest = max(times.values())
    return (times.get(chosen, slowest) if chosen is not None else 2 * slowest) / min(times.values())
