"""Fits a device's table to what `kernels.autotune.collect` measured. Needs NumPy and no device; imports no op by name.

`python -m tilewire.kernels.autotune.fitting MEASURED.jsonl [MEASURED…] [--out TABLE.json] [--held-out 5] [--keep 4]
[--only epilogue] [--correct]`

For each kind of products, a key of the table, costs of the model's terms are fitted first to all configurations
together. Then they are fitted to each by itself, drawn to the common ones. Only the comparison of candidates for one
shape counts, so each shape has a factor that all its candidates share. Then the few configurations are kept whose
predicted best loses the least. With `--keep` the table's configurations stay, and so many others at most join them. Their
costs are drawn to those of the table, so that few new measurements do. With `--only` they alone stay, and but for the terms
named all their costs do, too: `--groups epilogues --only epilogue` fits what a bias and an activation cost, without the
plain products' costs.

What these sums leave unexplained is learned then: the section's correction (`boosting.py`). With `--correct` nothing else
changes. Products of several devices can be learned from together.

Sources: Levenberg–Marquardt least squares on logarithms with a Gaussian prior.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tilewire.kernels.autotune.boosting import boost
from tilewire.kernels.autotune.collect import entries_of, tuning_of
from tilewire.kernels.autotune.workloads import parse_line
from tilewire.kernels.op import Config, Shape, Tuning, config_from, geomean
from tilewire.kernels.registry import kernel_op, tuned_ops
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.correction import NEAR, Correction, correction_of, factor
from tilewire.kernels.selection.tables import table_for, write_atomically

Array: TypeAlias = NDArray[np.float64]
Table: TypeAlias = dict[str, Any]

# Standard deviations of the logarithm of a cost: from the built-in one, and from the common one.
_FAR, _NEAR = 1.0, 0.5
# The same from the table's, where it is kept. For 545 16-bit products, judged by a fifth in turn, the choice took 3.2 % more
# than the fastest, 3.1 to 3.3 % with 0.05 to 0.5, and 3.7 % where nothing was kept (H100, seeds 271127301, 271127311 and
# 271127321).
_KEPT = 0.1
# Standard deviation of the logarithm of a time that the model predicts.
_NOISE = 0.08
# A time twice the fastest's weighs 1 / (1 + this).
_STEEPNESS = 6.0
_PASSES, _STEPS = 4, 25
# A configuration that was measured on fewer shapes is not kept.
_MIN_SHAPES = 2
# A section that fewer shapes were measured for is not corrected. Corrections learned from 67 int8 products made the choice
# of 13 others worse: 1.035 of the fastest's time, 1.027 without.
_LEAST_CORRECTED = 100
# Logarithms of times over predicted ones beyond these are not learned: times 0.6 and 2 times as long.
_CLIPPED = (-0.5, 0.7)
# Least cost that has a logarithm.
_LEAST_COST = 1e-9


@dataclass
class Measured:
    """Measurements of one shape.

    Attributes:
        shape: The shape.
        us: Microseconds by configuration.
        programs_per_sm: Programs on one multiprocessor, by configuration.
        vendors: Microseconds of others, by name.
        target: The device.
        is_held_out: Whether it judges the fit instead of being fitted to.
    """

    shape: Shape
    us: dict[Config, float]
    programs_per_sm: dict[Config, int]
    vendors: dict[str, float]
    target: Target
    is_held_out: bool = False

    @property
    def best_us(self) -> float:
        """Microseconds of the fastest configuration."""
        return min(self.us.values())

    def among(self, entries: Collection[Config], tuning: Tuning) -> Measured:
        """Returns the measurements of these entries of a table."""
        us = {config: us for config, us in self.us.items() if tuning.entry_of(config) in entries}
        return dataclasses.replace(self, us=us)


def read(paths: Iterable[Path], held_out: int) -> tuple[Table, list[Measured]]:
    """The device, and what was measured there; every `held_out`-th shape is held out, none with 0."""
    device: Table = {}
    found: list[Measured] = []
    for path in paths:
        for entry in entries_of(path):
            if "device" in entry:
                device, target = entry, Target(**entry["target"])
            elif "line" in entry:
                shape = parse_line(entry["line"])
                if kernel_op(shape.op).tuning is None:
                    continue
                tuning = tuning_of(shape)
                able = {key: config_from(tuning.config, key) for key in entry["us"] if key not in entry["bad"]}
                us = {able[key]: entry["us"][key] for key in able}
                programs = {able[key]: entry["programs_per_sm"].get(key, 1) for key in able}
                is_held_out = bool(held_out) and len(found) % held_out == held_out - 1
                if us:
                    found.append(Measured(shape, us, programs, entry["vendors"], target, is_held_out))
    return device, found


class Costs:
    """Costs of one key's configurations, fitted.

    Args:
        tuning: Tuning interface of the op.
        measured: Measurements of that key without the held-out shapes.
        known: Costs that configurations have already; of the terms that are not fitted they stay.
        only: Terms to fit; empty for all.
        kept: Terms whose costs are drawn to those that are known; the others are drawn to the common ones.
    """

    def __init__(
        self,
        tuning: Tuning,
        measured: Sequence[Measured],
        known: Mapping[Config, Sequence[float]],
        only: Sequence[str] = (),
        kept: Collection[str] = (),
    ) -> None:
        self._tuning = tuning
        terms = tuning.model.terms
        self._free = np.array([not only or term.name in only for term in terms])
        rows = [(number, config, us, each) for number, each in enumerate(measured) for config, us in each.us.items()]
        counts: dict[Config, Counter[int]] = defaultdict(Counter)
        by_binary: dict[Config, dict[str, int]] = defaultdict(dict)
        for _, config, _, each in rows:
            entry = tuning.entry_of(config)
            counts[entry][each.programs_per_sm[config]] += 1
            by_binary[entry][tuning.binary(each.shape, config)] = each.programs_per_sm[config]
        self.programs_per_sm = {entry: found.most_common(1)[0][0] for entry, found in counts.items()}
        # Binaries of an entry for which that number is another.
        self.others = {
            entry: {name: count for name, count in sorted(found.items()) if count != self.programs_per_sm[entry]}
            for entry, found in by_binary.items()
        }
        self._amounts = np.array([self.amounts(each, config) for _, config, _, each in rows])
        # Terms that no measurement has, whose costs stay what they were.
        self.unmeasured = [term.name for term, most in zip(terms, self._amounts.max(axis=0), strict=True) if not most]
        # Costs of terms that are not fitted, and the time that they explain.
        defaults = [term.default for term in terms]
        held = np.array([known.get(tuning.entry_of(config), defaults) for _, config, _, _ in rows])
        self._held_us = (self._amounts * held * ~self._free).sum(axis=1)
        self._amounts = self._amounts * self._free
        self._log_us = np.log([us for _, _, us, _ in rows])
        best_us = np.array([each.best_us for _, _, _, each in rows])
        excess = np.exp(self._log_us) / best_us - 1
        self._weights = 1 / (1 + _STEEPNESS * excess)
        shapes = np.array([number for number, _, _, _ in rows])
        of_entry: dict[Config, list[int]] = defaultdict(list)
        for row, (_, config, _, _) in enumerate(rows):
            of_entry[tuning.entry_of(config)].append(row)
        self.seen = {entry: len({int(shapes[row]) for row in found}) for entry, found in of_entry.items()}
        begin = np.log(defaults)
        is_kept = np.array([term.name in kept for term in terms])
        everything = np.arange(len(rows))
        self.common = self._fit(everything, np.zeros(len(rows)), begin, begin, np.full(len(terms), _FAR))
        own = dict.fromkeys(of_entry, self.common)
        for _ in range(_PASSES):
            predicted = np.zeros(len(rows))
            for entry, found in of_entry.items():
                predicted[found] = np.log(self._held_us[found] + self._amounts[found] @ np.exp(own[entry]))
            rest = (self._log_us - predicted) * self._weights
            shift = np.bincount(shapes, rest) / np.maximum(np.bincount(shapes, self._weights), 1e-9)
            # A slow configuration counts as much as a fast one while it is believed to be fast.
            believed = np.maximum(np.exp(predicted + shift[shapes]) / best_us - 1, 0)
            self._weights = 1 / (1 + _STEEPNESS * np.minimum(excess, believed))
            for entry, found in of_entry.items():
                is_drawn = is_kept & (entry in known)
                costs = np.log(np.maximum(known.get(entry, defaults), _LEAST_COST))
                centre, spread = np.where(is_drawn, costs, self.common), np.where(is_drawn, _KEPT, _NEAR)
                own[entry] = self._fit(np.array(found), shift[shapes], own[entry], centre, spread)
        self.own = {
            entry: np.where(self._free, found, np.log(np.maximum(known.get(entry, defaults), _LEAST_COST)))
            for entry, found in own.items()
        }

    def amounts(self, each: Measured, config: Config) -> tuple[float, ...]:
        """Of the model's terms."""
        found: tuple[float, ...] = self._tuning.amounts(each.shape, config, each.programs_per_sm[config], each.target)
        return found

    def predicted_us(self, each: Measured, config: Config) -> float:
        """Microseconds."""
        costs = tuple(np.exp(self.own[self._tuning.entry_of(config)]))
        return self._tuning.model.us(costs, self.amounts(each, config))

    def _fit(self, rows: NDArray[np.int64], shift: Array, begin: Array, centre: Array, spread: Array) -> Array:
        """Least squares from `begin`, drawn to `centre`."""
        amounts, wanted, held_us = self._amounts[rows], (self._log_us - shift)[rows], self._held_us[rows]
        weights = np.sqrt(self._weights[rows]) / _NOISE

        def loss(theta: Array) -> tuple[float, Array, Array]:
            parts = np.exp(theta) * amounts
            us = held_us + parts.sum(axis=1)
            # What nothing explains pulls so hard at most: times 0.6 and 2.7 times as long as predicted.
            misses = weights * np.clip(np.log(us) - wanted, -1.0, 0.5)
            total = float(misses @ misses + (((theta - centre) / spread) ** 2).sum())
            return total, misses, (weights / us)[:, None] * parts

        theta, damping = begin.copy(), 1.0
        now, misses, slopes = loss(theta)
        for _ in range(_STEPS):
            normal = slopes.T @ slopes + np.diag(1 / spread**2 + damping)
            step = np.linalg.solve(normal, slopes.T @ misses + (theta - centre) / spread**2)
            trial = theta - np.clip(step, -0.7, 0.7)
            after, trial_misses, trial_slopes = loss(trial)
            if after < now:
                is_done = now - after < 1e-4 * now
                theta, now, misses, slopes, damping = trial, after, trial_misses, trial_slopes, damping / 4
                if is_done:
                    break
            else:
                damping *= 5
        return theta


class Choice:
    """Predicted and measured cost of choosing among some configurations.

    Args:
        costs: Fitted.
        measured: Shapes.
        tuning: Tuning interface of the op.
    """

    def __init__(self, costs: Costs, measured: Sequence[Measured], tuning: Tuning) -> None:
        self.entries = [entry for entry, seen in costs.seen.items() if seen >= _MIN_SHAPES]
        number = {entry: index for index, entry in enumerate(self.entries)}
        count = len(self.entries)
        self.predicted = np.full((len(measured), count), np.inf)
        self.loss = np.full((len(measured), count), np.inf)
        # Where an entry must be built for all layouts to serve a shape.
        self.is_rare = np.array([not tuning.is_common(each.shape, each.target) for each in measured])
        for row, each in enumerate(measured):
            for config, us in each.us.items():
                column = number.get(tuning.entry_of(config))
                if column is not None:
                    predicted = costs.predicted_us(each, config)
                    if predicted < self.predicted[row, column]:
                        self.predicted[row, column] = predicted
                        self.loss[row, column] = us / each.best_us

    def losses(self, common: Sequence[int], everywhere: Sequence[int]) -> Array:
        """How many times the fastest's time each shape would take."""
        found = np.full(len(self.predicted), 4.0)
        for is_rare, kept in ((False, [*common, *everywhere]), (True, list(everywhere))):
            rows = np.flatnonzero(self.is_rare == is_rare)
            if len(rows) and kept:
                best = np.argmin(self.predicted[rows][:, kept], axis=1)
                loss = self.loss[rows][:, kept][np.arange(len(rows)), best]
                found[rows] = np.where(np.isfinite(loss), loss, 4.0)
        return found

    def select(
        self,
        num_common: int,
        num_everywhere: int,
        least_gain: float,
        start_common: Sequence[Config],
        start_everywhere: Sequence[Config],
    ) -> tuple[list[int], list[int]]:
        """The entries that lose the least: for all layouts first, then for the most common one.

        Args:
            num_common: Most entries for the most common layout.
            num_everywhere: Most entries for all layouts.
            least_gain: Smallest gain of a further entry, as a difference of logarithms.
            start_common: Entries for the most common layout that are among them.
            start_everywhere: Those for all layouts.
        """
        everywhere = [self.entries.index(entry) for entry in start_everywhere]
        common = [self.entries.index(entry) for entry in start_common]
        for kept, count in ((everywhere, num_everywhere), (common, num_common)):
            now = float(np.log(self.losses(common, everywhere)).mean()) if kept or kept is common else float("inf")
            while len(kept) < count:
                rest = [index for index in range(len(self.entries)) if index not in (*everywhere, *common)]
                losses = []
                for index in rest:
                    kept.append(index)
                    losses.append(float(np.log(self.losses(common, everywhere)).mean()))
                    kept.pop()
                if not rest or min(losses) > now - least_gain:
                    break
                now = min(losses)
                kept.append(rest[losses.index(now)])
        return common, everywhere


def _by_key(measured: Sequence[Measured]) -> list[tuple[tuple[str, str], list[Measured]]]:
    """Measurements by op and key of its table, sorted."""
    found: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for each in measured:
        found[each.shape.op, tuning_of(each.shape).key(each.shape)].append(each)
    return sorted(found.items())


def fit(
    measured: Sequence[Measured],
    target: Target,
    say: Callable[[str], None],
    more: int | None = None,
    only: Sequence[str] = (),
) -> Table:
    """The sections of a table for every key that was measured.

    Args:
        measured: Measurements.
        target: The device.
        say: Prints a line about each section.
        more: Configurations that may join those of the device's table, which stay; None to choose all anew.
        only: Terms whose costs are fitted, with 0 `more`; empty for all.
    """
    table: Table = {}
    for (op, key), every in _by_key(measured):
        tuning = tuning_of(every[0].shape)
        if not key:
            continue
        section = {"tiles": [], "costs": {}} | table_for(target).get(op, {}).get(key, {})
        old = {_entry_of(each, tuning): each for each in section["tiles"]}
        known = {entry: tuning.model.costs(each.get("costs", {}), section["costs"]) for entry, each in old.items()}
        found = [among for each in every if (among := each.among(known, tuning)).us] if only else every
        if not found:
            continue
        learned = [each for each in found if not each.is_held_out]
        named = {name for each in (section, *section["tiles"]) for name in each.get("costs", {})}
        costs = Costs(tuning, learned, known, only, named if more is not None and not only else ())
        choice = Choice(costs, learned, tuning)
        num_common, num_everywhere, least_gain = tuning.sizes(key)
        kept = old if more is not None or tuning.keeps else {}
        start = [
            [entry for entry in kept if entry in choice.entries and kept[entry].get("all_layouts", False) == flag]
            for flag in (False, True)
        ]
        if kept:
            room = more if more is not None else num_common + num_everywhere - len(kept)
            num_common, num_everywhere = len(start[0]) + room, len(start[1])
        common, everywhere = choice.select(num_common, num_everywhere, least_gain, *start)
        chosen = {choice.entries[index]: index in everywhere for index in (*everywhere, *common)}
        # Some shapes can only be computed by a kernel that is seldom the best.
        kernels = {entry.kernel for entry in chosen}
        rest = {entry: each for entry, each in old.items() if entry in kept or entry.kernel not in kernels}
        tiles = [each for entry, each in rest.items() if entry not in chosen]
        for entry, flag in chosen.items():
            shown = _shown(entry, costs, tuning, all_layouts=flag)
            known_costs = old.get(entry, section).get("costs", {})
            tiles.append(shown | {"costs": shown["costs"] | _picked(known_costs, costs.unmeasured)})
        if only:
            # In the order that the table has.
            fitted = {_entry_of(tile, tuning): _picked(tile.get("costs", {}), only) for tile in tiles}
            tiles = [tile | {"costs": tile.get("costs", {}) | fitted[entry]} for entry, tile in old.items()]
        common_costs = _named(costs.common, tuning) | _picked(section["costs"], costs.unmeasured)
        defaults = section["costs"] if only else common_costs
        # Where times of epilogues alone were measured, what was learned from all stays.
        kept_correction = _picked(section, ("correction",)) if only else {}
        table.setdefault(op, {})[key] = {"costs": defaults, "tiles": tiles} | kept_correction
        judged = [each for each in found if each.is_held_out] or learned
        judge = Choice(costs, judged, tuning)
        number = {entry: index for index, entry in enumerate(judge.entries)}
        places = [[number[choice.entries[index]] for index in indices] for indices in (common, everywhere)]
        _say_how_good(f"{op} {key}", learned, judged, judge, places, say)
    return table if only else table | correct(measured, table, say)


def correct(measured: Sequence[Measured], table: Table, say: Callable[[str], None]) -> Table:
    """The ops of `table` whose times are corrected, with corrections of the sections that were measured learned anew."""
    found: Table = {}
    for (op, key), every in _by_key(measured):
        tuning = tuning_of(every[0].shape)
        if tuning.facts is None or key not in table.get(op, {}):
            continue
        section = found.setdefault(op, dict(table[op]))[key]
        costs = {
            _entry_of(each, tuning): tuning.model.costs(each.get("costs", {}), section["costs"])
            for each in section["tiles"]
        }
        launches = [_launches_of(each, costs, tuning) for each in every]
        corrected = [(each, some) for each, some in zip(every, launches, strict=True) if some]
        learned = [some for each, some in corrected if not each.is_held_out]
        judged = [some for each, some in corrected if each.is_held_out] or learned
        if len(learned) < _LEAST_CORRECTED:
            continue
        trees = boost(*_examples(learned))
        names = list(learned[0][0].facts._fields)
        section = found[op][key] = section | {"correction": {"facts": names, "trees": trees}}
        before, after = (_lost(judged, trees) for trees in ((), correction_of(section, names)))
        say(
            f"{op} {key}: corrected by {len(learned)} shapes; {len(judged)} judged: the choice takes {before:.3f} "
            f"of the fastest's time without, {after:.3f} with it"
        )
    return found


class _Launch(NamedTuple):
    """A launch that was measured: its microseconds, those that its terms predict, and its facts."""

    us: float
    predicted_us: float
    facts: Any


def _launches_of(each: Measured, costs: Mapping[Config, Sequence[float]], tuning: Tuning) -> list[_Launch]:
    """Those of a shape that are corrected, if there are two or more."""
    assert tuning.facts is not None, "This is a bug."
    found = []
    for config, us in each.us.items():
        entry_costs = costs.get(tuning.entry_of(config))
        if entry_costs is not None:
            launch = (each.shape, config, each.programs_per_sm[config], each.target)
            predicted_us = tuning.model.us(tuple(entry_costs), tuning.amounts(*launch))
            found.append(_Launch(us, predicted_us, tuning.facts(*launch)))
    least_us = min((launch.predicted_us for launch in found), default=0.0)
    near = [launch for launch in found if launch.predicted_us <= NEAR * least_us]
    return near if len(near) > 1 else []


def _examples(learned: Sequence[Sequence[_Launch]]) -> tuple[Array, Array, Array]:
    """Facts, logarithms of the times over the predicted ones, and weights. Only what differs within a shape counts."""
    facts: list[Any] = []
    wanted: list[float] = []
    weights: list[float] = []
    for launches in learned:
        us, predicted_us = (np.array([launch[place] for launch in launches]) for place in range(2))
        excess = us / us.min() - 1
        weight = 1 / (1 + _STEEPNESS * excess)
        ratio = np.log(us / predicted_us)
        ratio -= (ratio @ weight) / weight.sum()
        facts += [launch.facts for launch in launches]
        wanted += list(np.clip(ratio, *_CLIPPED))
        weights += list(weight)
    return np.array(facts, dtype=float), np.array(wanted), np.array(weights)


def _lost(judged: Sequence[Sequence[_Launch]], trees: Correction) -> float:
    """How many times the fastest's time the choice takes, by geomean."""
    found = []
    for launches in judged:
        chosen = min(launches, key=lambda launch: launch.predicted_us * factor(trees, launch.facts))
        found.append(chosen.us / min(launch.us for launch in launches))
    return geomean(found)


def _say_how_good(
    name: str,
    learned: Sequence[Measured],
    judged: Sequence[Measured],
    judge: Choice,
    places: Sequence[Sequence[int]],
    say: Callable[[str], None],
) -> None:
    losses = judge.losses(*places)
    every = judge.losses(range(len(judge.entries)), range(len(judge.entries)))
    vendors = [min(each.vendors.values()) / each.best_us if each.vendors else 0.0 for each in judged]
    ratios = [vendor / loss for vendor, loss in zip(vendors, losses, strict=True) if vendor]
    say(
        f"{name}: {len(learned)} shapes, kept {'+'.join(str(len(part)) for part in places)} of {len(judge.entries)}; "
        f"{len(judged)} judged: {geomean(list(losses)):.3f} of the fastest, most {losses.max():.2f} (by all "
        f"{geomean(list(every)):.3f}); vendor / ours {geomean(ratios):.3f}, least {min(ratios, default=0):.2f}; "
        f"vendor / fastest {geomean([vendor for vendor in vendors if vendor]):.3f}"
    )


def _entry_of(shown: Table, tuning: Tuning) -> Config:
    """The configuration of an entry of a table."""
    names = [field.name for field in dataclasses.fields(tuning.config)]
    return tuning.config(**{name: shown[name] for name in names if name in shown})


def _shown(entry: Config, costs: Costs, tuning: Tuning, *, all_layouts: bool) -> Table:
    """The entry of a table for a configuration."""
    fields = {
        field.name: getattr(entry, field.name)
        for field in dataclasses.fields(entry)
        if getattr(entry, field.name) != field.default or field.default is dataclasses.MISSING
    }
    more: Table = {"occupancy": costs.programs_per_sm[entry]}
    more |= {"occupancies": costs.others[entry]} if costs.others[entry] else {}
    more |= {"all_layouts": True} if all_layouts else {}
    return fields | more | {"costs": _named(costs.own[entry], tuning)}


def _picked(costs: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Those of `costs` that have one of `names`."""
    return {name: cost for name, cost in costs.items() if name in names}


def _named(theta: Array, tuning: Tuning) -> dict[str, float]:
    names = [term.name for term in tuning.model.terms]
    return {name: float(f"{value:.3g}") for name, value in zip(names, np.exp(theta), strict=True)}


def main(argv: Sequence[str] | None = None) -> int:
    """Fits; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="table to write; what was not measured stays as it is there")
    parser.add_argument("--held-out", type=int, default=5, help="judge by every n-th shape; 0 to fit to all")
    parser.add_argument("--keep", type=int, help="keep the table's configurations, and add at most so many to each key")
    parser.add_argument(
        "--only", nargs="+", default=(), help="fit the costs of these terms alone; nothing else changes"
    )
    parser.add_argument(
        "--correct", action="store_true", help="learn corrections of the table's times; nothing else changes"
    )
    arguments = parser.parse_args(argv)
    device, measured = read(arguments.measured, arguments.held_out)
    target = Target(**device["target"])
    if arguments.correct:
        table = correct(measured, table_for(target), print)
    else:
        more = 0 if arguments.only else arguments.keep
        table = fit(measured, target, print, more, arguments.only)
    if arguments.out:
        whole = json.loads(arguments.out.read_text()) if arguments.out.is_file() else dict(table_for(target))
        write_atomically(
            arguments.out,
            as_text(
                whole | {op.name: whole.get(op.name, {}) | table[op.name] for op in tuned_ops() if op.name in table}
            ),
        )
    return 0


def as_text(table: Table) -> str:
    """JSON with one configuration or tree a line, so that changes can be read."""
    text = json.dumps(table, indent=1)
    lines: list[str] = []
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        if depth > 4 and lines and not (depth == 5 and line.strip() == "["):
            lines[-1] += ("" if lines[-1].endswith("{") else " ") + line.strip()
        elif depth == 4 and line.strip().startswith("}") and lines:
            lines[-1] += line.strip()
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
