"""Fitting the costs of `kernels.selection.cost_model` to measured times. Pure: NumPy, no device; knows no op and no table.

What counts is how the candidates for one workload compare. So each workload has a factor of its own that all its
candidates share, found in turns with the costs, and the candidates near the fastest weigh the most. A configuration that
was measured seldom is drawn to the costs that those like it have in common.

Sources: Levenberg–Marquardt least squares on logarithms, with Huber's weights and a Gaussian prior; ridge regression.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tilewire.kernels.selection.cost_model import (
    BENDS,
    LAYOUTS,
    TERMS,
    Costs,
    Forecast,
    Work,
    amounts,
    blended,
    layouts,
)

Array: TypeAlias = NDArray[np.float64]
Key: TypeAlias = tuple[str, Hashable]

# Where every fit begins: microseconds by `TERMS`, of a tile of 64 × 128 and 64 of K on an H100.
_BEGIN = np.log([1.2, 0.4, 0.3, 0.4, 0.2, 0.15, 0.02, 0.35, 0.17, 0.15, 0.3, 0.05, 0.17, 0.3])
# How these grow with a tile, and with a step.
_TILE_POWER, _STEP_POWER = 0.6, 0.75
_TILE_TERMS = tuple(TERMS.index(name) for name in ("wave", "turn", "store"))
_STEP_TERMS = tuple(TERMS.index(name) for name in ("step of a wave", "step of a turn", "mean step"))
# One over the variance of a cost among those alike, in units of one measurement's.
_PRIOR = np.concatenate([np.full(len(TERMS), 0.01), np.full(len(LAYOUTS), 0.3)])
_POOLED_RIDGE, _RIDGE = 0.03, 0.3
# How many measurements those alike must have to be believed as much as `_BEGIN`.
_BELIEF = 20.0
_MOST_BELIEF = 60.0
# A time twice the fastest's weighs 1 / (1 + this); one of a single call that much less again.
_STEEPNESS, _ROUGHNESS = 8.0, 0.1
_OUTLIER, _MOST_BEND = 0.12, 0.4
_PASSES, _STEPS = 4, 20
_OCCUPANCIES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Sample:
    """One configuration timed on one workload.

    Attributes:
        workload: which.
        group: what is alike: costs of configurations of a group resemble one another.
        entry: the configuration without its splits.
        work: the launch.
        splits: its splits.
        us: microseconds.
        best_us: of the fastest configuration on that workload.
        is_close: whether it was timed well, being near the fastest; else `us` is of a single call.
        tile: elements of a tile.
        step: multiplications of a step.
    """

    workload: int
    group: str
    entry: Hashable
    work: Work
    splits: int
    us: float
    best_us: float
    is_close: bool
    tile: int
    step: int


class _Entry:
    """One configuration's samples as arrays, and its costs as far as they are known."""

    def __init__(self, samples: Sequence[Sample], num_sms: int) -> None:
        self._samples = samples
        self._num_sms = num_sms
        self.workloads = np.array([each.workload for each in samples])
        self.log_us = np.log([each.us for each in samples])
        self.is_close = np.array([each.is_close for each in samples])
        excess = np.maximum([each.us / each.best_us for each in samples], 1.0) - 1
        self.weights = np.where(self.is_close, 1.0, _ROUGHNESS) / (1 + _STEEPNESS * excess)
        self._layouts = np.array([layouts(each.work) for each in samples])
        self._scale = np.zeros(len(TERMS) + len(LAYOUTS))
        self._scale[list(_TILE_TERMS)] = _TILE_POWER * math.log(samples[0].tile / (64 * 128))
        self._scale[list(_STEP_TERMS)] = _STEP_POWER * math.log(samples[0].step / (64 * 128 * 64))
        self.costs = np.concatenate([_BEGIN, np.zeros(len(LAYOUTS))])
        self.bend = np.zeros(len(BENDS))
        self.assume(1)

    def assume(self, programs_per_sm: int) -> None:
        """Take it that so many programs run on a multiprocessor at a time."""
        self.programs_per_sm = programs_per_sm
        facts = [(each.work, each.splits, programs_per_sm, self._num_sms) for each in self._samples]
        self._amounts = np.array([amounts(*each) for each in facts], dtype=np.float64).T

    def unbend(self) -> None:
        """Find what each weight of the factor is multiplied with, now that the number of programs is known."""
        units = [
            Costs(self.programs_per_sm, (0.0,) * len(TERMS), (0.0,) * len(LAYOUTS), tuple(unit))
            for unit in np.eye(len(BENDS)).tolist()
        ]
        self.bends = np.array(
            [[Forecast(each.work, unit, self._num_sms).bend(each.splits) for unit in units] for each in self._samples]
        )

    def log_sum(self, costs: Array) -> Array:
        """The logarithm of the model's sum."""
        scaled = costs + self._scale
        us, layout = np.exp(scaled[: len(TERMS)]), scaled[len(TERMS) :]
        found: Array = np.log(blended(list(us), np.exp(self._layouts @ layout), list(self._amounts)))
        return found

    def fit_costs(self, shift: Array, centre: Array) -> float:
        """Fit the costs to times divided by exp(`shift`), drawn to `centre`; what is left."""
        wanted = self.log_us - shift
        self.costs, left = _least_squares(lambda costs: self.log_sum(costs) - wanted, self.weights, centre, _PRIOR)
        self.rest = np.clip(wanted - self.log_sum(self.costs), -_MOST_BEND, _MOST_BEND)
        return left

    def fit_bend(self, pooled: Array) -> None:
        """Fit what is left, drawn to what those alike have."""
        matrix, vector = self.normal(pooled)
        ridge = np.full(len(BENDS), _RIDGE)
        ridge[0] *= 0.3
        self.bend = pooled + np.linalg.solve(matrix + np.diag(ridge), vector)

    def normal(self, bend: Array) -> tuple[Array, Array]:
        """The normal equations of what `bend` leaves."""
        weighted = self.weights[:, None] * self.bends
        return self.bends.T @ weighted, weighted.T @ (self.rest - self.bends @ bend)

    def residuals(self) -> Array:
        """Logarithms of measured over predicted times."""
        found: Array = self.log_us - self.log_sum(self.costs) - self.bends @ self.bend
        return found

    def result(self) -> Costs:
        """What was found, without scales."""
        scaled = self.costs + self._scale
        us, layout = np.exp(scaled[: len(TERMS)]), scaled[len(TERMS) :]
        return Costs(self.programs_per_sm, tuple(us.tolist()), tuple(layout.tolist()), tuple(self.bend.tolist()))


def fit(samples: Sequence[Sample], num_sms: int, on_pass: Callable[[int, int], None] | None = None) -> dict[Key, Costs]:
    """The costs of every configuration that was measured.

    Args:
        samples: of all configurations that are alternatives to one another.
        num_sms: multiprocessors of the device.
        on_pass: hears how many of how many passes are done.

    Returns:
        By group and entry.
    """
    by_key: dict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_key[sample.group, sample.entry].append(sample)
    entries = {key: _Entry(each, num_sms) for key, each in by_key.items()}
    shifts = np.zeros(1 + max((each.workload for each in samples), default=0))
    centres: dict[str, Array] = defaultdict(lambda: np.concatenate([_BEGIN, np.zeros(len(LAYOUTS))]))
    for number in range(_PASSES):
        for (group, _), entry in entries.items():
            shift = shifts[entry.workloads]
            if number == 0:
                _occupy(entry, shift, centres[group])
            entry.fit_costs(shift, centres[group])
        for group in {group for group, _ in entries}:
            alike = [entry for (of, _), entry in entries.items() if of == group]
            pooled = _pooled(alike)
            for entry in alike:
                entry.fit_bend(pooled)
            centres[group] = _centre(alike)
        shifts = _shifts(list(entries.values()), len(shifts))
        if on_pass:
            on_pass(number + 1, _PASSES)
    return {key: entry.result() for key, entry in entries.items()}


def _occupy(entry: _Entry, shift: Array, centre: Array) -> None:
    """Assume the number of programs on a multiprocessor that explains the times best."""

    def left(programs_per_sm: int) -> float:
        entry.assume(programs_per_sm)
        return entry.fit_costs(shift, centre)

    entry.assume(min(_OCCUPANCIES, key=left))
    entry.unbend()


def _pooled(alike: Sequence[_Entry]) -> Array:
    """The factors that those alike have in common."""
    matrix, vector = _POOLED_RIDGE * np.eye(len(BENDS)), np.zeros(len(BENDS))
    for entry in alike:
        more, right = entry.normal(np.zeros(len(BENDS)))
        matrix += more
        vector += right
    return np.asarray(np.linalg.solve(matrix, vector))


def _centre(alike: Sequence[_Entry]) -> Array:
    """The costs that those alike have in common."""
    beliefs = [min(_MOST_BELIEF, float(entry.weights.sum())) for entry in alike]
    begin = np.concatenate([_BEGIN, np.zeros(len(LAYOUTS))])
    total = sum((belief * entry.costs for belief, entry in zip(beliefs, alike, strict=True)), _BELIEF * begin)
    return np.asarray(total / (_BELIEF + sum(beliefs)))


def _shifts(entries: Sequence[_Entry], count: int) -> Array:
    """The logarithm of each workload's own factor."""
    sums, weights = np.zeros(count), np.ones(count)
    for entry in entries:
        close = entry.is_close
        np.add.at(sums, entry.workloads[close], (entry.weights * entry.residuals())[close])
        np.add.at(weights, entry.workloads[close], entry.weights[close])
    return np.asarray(sums / weights)


def _least_squares(
    residuals: Callable[[Array], Array], weights: Array, centre: Array, prior: Array
) -> tuple[Array, float]:
    """The values with the least Huber loss of `residuals`, drawn to `centre`; and that loss."""

    def loss(values: Array) -> float:
        size = np.abs(residuals(values))
        huber = np.where(size < _OUTLIER, size**2, 2 * _OUTLIER * size - _OUTLIER**2)
        return float((weights * huber).sum() + (prior * (values - centre) ** 2).sum())

    values, damping = centre.copy(), 1e-2
    least = loss(values)
    for _ in range(_STEPS):
        rest = residuals(values)
        slopes = _slopes(residuals, values, rest)
        robust = weights * np.minimum(1.0, _OUTLIER / np.maximum(np.abs(rest), 1e-9))
        matrix = slopes.T @ (robust[:, None] * slopes) + np.diag(prior)
        gradient = slopes.T @ (robust * rest) + prior * (values - centre)
        trial, found, damping = _damped(loss, values, least, (matrix, gradient), damping)
        is_done = least - found < 1e-5 * least
        values, least = trial, found
        if is_done:
            break
    return values, least


def _slopes(residuals: Callable[[Array], Array], values: Array, rest: Array) -> Array:
    """Partial derivatives, by differences."""
    columns = []
    for place in range(len(values)):
        moved = values.copy()
        moved[place] += 1e-4
        columns.append((residuals(moved) - rest) / 1e-4)
    return np.array(columns).T


def _damped(
    loss: Callable[[Array], float], values: Array, least: float, normal: tuple[Array, Array], damping: float
) -> tuple[Array, float, float]:
    """A step that lowers the loss, shorter the more damping that takes; the same values when none does."""
    matrix, gradient = normal
    for _ in range(6):
        damped: Any = matrix + damping * np.diag(np.diag(matrix) + 1e-9)
        trial = values + np.clip(np.linalg.solve(damped, -gradient), -1.5, 1.5)
        found = loss(trial)
        if found < least:
            return trial, found, max(damping / 6, 1e-6)
        damping *= 4
    return values, least, damping
