"""From times that were measured on many workloads to the entries of `costs` in a table. Launches nothing.

Which configurations keep costs is decided by what would be lost without them: the fewer there are, the quicker is a
choice, and the fewer are the mistakes to make. Knows how each op's launches are described to the model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tilewire.kernels.autotune.fitting import Key, Sample, fit
from tilewire.kernels.autotune.racing import Times
from tilewire.kernels.autotune.selection import relative
from tilewire.kernels.autotune.workloads import Config, Product, Rows, Workload, geomean
from tilewire.kernels.matmul import timing as products
from tilewire.kernels.matmul.configs import Config as ProductConfig
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.cost_model import Costs, Forecast
from tilewire.kernels.softmax import choice as rows_of
from tilewire.kernels.softmax.configs import Config as RowsConfig

Entry = dict[str, Any]
# Fewer do not tell one configuration from another; what so many teach mostly beats the table, and is judged anyway.
LEAST_LEARNED = 40
# What a race times well: its first calls, of one round, are believed where nothing can have interrupted them.
_NEAR, _SLACK_US = 1.5, 8.0
_INTERRUPTED_US = (36.0, 160.0)
# What the host takes of a single call.
_HOST_US = 8.0
# The geomean that may be lost, of all that is measured, by having costs of fewer configurations.
_MOST_LOST = 0.002
_MOST_REGRET = 3.0
_DIGITS = 4
# In how many turns workloads are left out, and how near to the fastest a choice is close.
_FOLDS, _CLOSE = 4, 1.1


def learn(
    measured: Mapping[Workload, Times],
    by_table: Mapping[Workload, Config | None],
    target: Target,
    on_key: Callable[[int, int], None] | None = None,
) -> dict[str, Entry]:
    """The entries of `costs`: by key, those of each configuration worth having.

    A key whose costs choose no better than the table, for workloads that they were not fitted to, has none.

    Args:
        measured: times of candidates by workload.
        by_table: what is chosen without costs, by workload; those without are not judged by.
        target: the device.
        on_key: hears how many of how many keys are done.
    """
    by_key: dict[str, dict[Workload, Times]] = defaultdict(dict)
    for workload, times in measured.items():
        if times and (key := key_of(workload)):
            by_key[key][workload] = times
    found = {}
    for number, (key, raced) in enumerate(sorted(by_key.items()), start=1):
        if len(raced) >= LEAST_LEARNED:
            held_out = _held_out(raced, by_table, target)
            if held_out["geomean"] < held_out["by_table"]:
                found[key] = {"held_out": held_out} | _entries(raced, target)
        if on_key:
            on_key(number, len(by_key))
    return found


def key_of(workload: Workload) -> str:
    """The key of the costs that `workload` is chosen by; empty for one that is chosen otherwise."""
    if isinstance(workload, Product):
        return products.key_of(workload.problem)
    if isinstance(workload, Rows) and workload.problem.is_contiguous:
        return rows_of.key_of(workload.problem)
    return ""


def _held_out(raced: Mapping[Workload, Times], by_table: Mapping[Workload, Config | None], target: Target) -> Entry:
    """How many times the fastest's time the costs' choices take, and the table's, for workloads in turn left out."""
    workloads = list(raced)
    ours, theirs = [], []
    for turn in range(_FOLDS):
        left_out = workloads[turn::_FOLDS]
        samples = _all_samples({each: raced[each] for each in workloads if each not in set(left_out)})
        kept = _worth_having(samples)
        costs = {key: each for key, each in fit(samples, target.num_sms).items() if key[1] in kept}
        for workload in left_out:
            times = raced[workload]
            choice, other = _choice(workload, times, costs, target), by_table.get(workload)
            # What an interruption may have slowed tells nothing of the table's choice either.
            if choice is not None and other in times and _is_believed(times[other], min(times.values())):
                ours.append(relative(times, choice))
                theirs.append(relative(times, other))
    within = sum(each <= _CLOSE for each in ours) / max(1, len(ours))
    figures = {"geomean": geomean(ours), "within_10_percent": within, "by_table": geomean(theirs)}
    return {"workloads": len(ours)} | {name: _rounded(value) for name, value in figures.items()}


def _choice(workload: Workload, times: Times, costs: Mapping[Key, Costs], target: Target) -> Config | None:
    """The configuration with the least predicted time, of those that were timed well or whose time is past doubt."""
    predicted = {}
    best_us = min(times.values())
    for config, us in times.items():
        if _is_believed(us, best_us):
            shown = _sample(workload, config, 0, (us, best_us, True))
            known = costs.get((shown.group, shown.entry))
            if known is not None:
                predicted[config] = Forecast(shown.work, known, target.num_sms).us(shown.splits)
    return min(predicted, key=predicted.__getitem__, default=None)


def _entries(raced: Mapping[Workload, Times], target: Target) -> Entry:
    samples = _all_samples(raced)
    kept = _worth_having(samples)
    listed = sorted(
        ((entry, each) for (_, entry), each in fit(samples, target.num_sms).items() if entry in kept), key=str
    )
    return {"most": max(map(_size, raced)), "entries": [_entry(entry, each) for entry, each in listed]}


def _size(workload: Workload) -> int:
    if isinstance(workload, Product):
        return workload.problem.flops
    assert isinstance(workload, Rows), "This is a bug."
    return rows_of.work_size(workload.problem)


def _all_samples(raced: Mapping[Workload, Times]) -> list[Sample]:
    """The times that are to be believed."""
    samples = []
    for number, (workload, times) in enumerate(raced.items()):
        best_us = min(times.values())
        for config, us in times.items():
            if _is_believed(us, best_us):
                is_close = us <= _near_us(best_us)
                samples.append(
                    _sample(workload, config, number, (us if is_close else us - _HOST_US, best_us, is_close))
                )
    return samples


def _is_believed(us: float, best_us: float) -> bool:
    return us <= _near_us(best_us) or not _INTERRUPTED_US[0] <= us <= _INTERRUPTED_US[1]


def _near_us(best_us: float) -> float:
    """Up to here a race times more than a single call."""
    return _NEAR * best_us + _SLACK_US


def _sample(workload: Workload, config: Config, number: int, timed: tuple[float, float, bool]) -> Sample:
    if isinstance(workload, Product):
        assert isinstance(config, ProductConfig), "This is a bug."
        problem, area = workload.problem, config.block_m * config.block_n
        work = products.work_of(problem, config, is_plain=workload.is_plain)
        entry = products.entry_of(problem, config)
        return Sample(number, config.kernel, entry, work, config.split_k, *timed, area, area * config.block_k)
    assert isinstance(workload, Rows), "This is a bug."
    assert isinstance(config, RowsConfig), "This is a bug."
    work, area = rows_of.work_of(workload.problem, config), config.block_rows * config.block_n
    return Sample(number, config.kernel, rows_of.entry_of(config), work, config.splits, *timed, area, 64 * area)


def _worth_having(samples: Sequence[Sample]) -> set[Any]:
    """Entries without whom more would be lost than is allowed, found by leaving out one at a time.

    Of softmax all are: a block is for rows of a certain length.
    """
    if isinstance(samples[0].entry, RowsConfig):
        return {sample.entry for sample in samples}
    names = list(dict.fromkeys(sample.entry for sample in samples))
    losses = np.full((1 + max(sample.workload for sample in samples), len(names)), math.log(_MOST_REGRET))
    for sample in samples:
        place = sample.workload, names.index(sample.entry)
        losses[place] = min(losses[place], math.log(max(1.0, sample.us / sample.best_us)))
    kept = list(range(len(names)))
    while len(kept) > 1:
        without = {each: [other for other in kept if other != each] for each in kept}
        lost = {each: float(losses[:, rest].min(axis=1).mean()) for each, rest in without.items()}
        least = min(kept, key=lost.__getitem__)
        if lost[least] > math.log1p(_MOST_LOST):
            break
        kept = without[least]
    return {names[each] for each in kept}


def _entry(entry: Any, costs: Costs) -> Entry:
    if isinstance(entry, RowsConfig):
        shown = {name: value for name, value in asdict(entry).items() if name not in ("splits", "programs_per_sm")}
        shown["team_per_sm"] = entry.programs_per_sm
    else:
        store, config = entry
        shown = {"store": store} | {name: value for name, value in asdict(config).items() if name != "split_k"}
    figures = {name: [_rounded(each) for each in getattr(costs, name)] for name in ("us", "layout", "bend")}
    return {**shown, "programs_per_sm": costs.programs_per_sm, **figures}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
