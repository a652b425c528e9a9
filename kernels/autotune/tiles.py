"""Tuning the descriptor kernel's tiles: their costs for the model, and which of them a table lists. Launches nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tilewire.kernels.autotune import space
from tilewire.kernels.autotune.compiling import Recipe
from tilewire.kernels.autotune.racing import Times
from tilewire.kernels.autotune.selection import keep_few, relative
from tilewire.kernels.autotune.session import Session
from tilewire.kernels.autotune.workloads import Product, geomean
from tilewire.kernels.matmul.choice import by_model, choose_by_table, predicted_us
from tilewire.kernels.matmul.configs import Config, Problem
from tilewire.kernels.matmul.members import arithmetic_of, family_of, has_descriptors, is_main
from tilewire.kernels.matmul.table import Candidate, candidate_of, config_of
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import is_tuned, table_for

Entry = dict[str, Any]
# About as many as the first table has, so that the catalogue keeps its size; of these, those built for every layout.
MOST_ENTRIES = {"half": 20, "int8": 8, "float8": 8, "tf32": 8, "tf32x3": 6}
_MOST_WIDE = 3
_DTYPES = {"half": "bfloat16", "int8": "int8", "float8": "float8_e4m3fn", "tf32": "float32", "tf32x3": "float32"}
_STEPS = (8, 40)
# Long sums also wait for memory, which makes a step look dearer and a tile cheaper than any can be.
_LEAST_TILE_US = 1.0
# How many of the model's favourites are timed, on products that every candidate is built for and on others.
_MOST_RACED = 28
_MOST_RACED_ELSEWHERE = 10
_FIELDS = ("kernel", "block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages", "is_persistent")


@dataclass(frozen=True)
class _Plan:
    """What the model would do with one candidate: how long it thinks that takes, and with how many splits."""

    predicted_us: float
    config: Config


class TilesPart:
    """One arithmetic's entry of `tiles`.

    Args:
        arithmetic: a key of `MOST_ENTRIES`.
        workloads: what it is tuned for; those that the model does not choose for are left out.
        target: the device.
    """

    op = "matmul"

    def __init__(self, arithmetic: str, workloads: Iterable[Product], target: Target) -> None:
        self.name = f"matmul {arithmetic}"
        self._arithmetic = arithmetic
        self._target = target
        self._workloads = [each for each in workloads if is_modelled(each, arithmetic, target)]
        self._old = table_for(target).get("matmul", {}).get("tiles", {}).get(arithmetic, [])
        self._candidates: list[Candidate] = []
        self._plans: dict[tuple[Product, Config, bool], _Plan] = {}
        self._times: dict[Product, Times] = {}

    def measure(self, session: Session) -> None:
        """Compile candidates, take their costs, and race the model's favourites on each workload."""
        configs = list(dict.fromkeys([*map(config_of, self._old), *space.tall(self._arithmetic, self._target)]))
        recipes = {config: self._recipe(_probe(self._arithmetic, config, 1, 8), config) for config in configs}
        facts = session.survivors(recipes.values())
        fitting = [config for config in configs if recipes[config] in facts]
        for number, config in enumerate(fitting, start=1):
            if session.is_over():
                return
            self._candidates += self._costed(session, config, facts[recipes[config]].programs_per_sm(self._target))
            session.step("costs", number, len(fitting))
        self._race(session)

    def _costed(self, session: Session, config: Config, programs: int) -> list[Candidate]:
        def costs(num_tiles: int) -> tuple[float, float]:
            times = [session.hot_us(_probe(self._arithmetic, config, num_tiles, steps), config) for steps in _STEPS]
            step_us = (times[1] - times[0]) / (_STEPS[1] - _STEPS[0])
            return max(_LEAST_TILE_US, times[0] - _STEPS[0] * step_us), step_us

        alone, full = costs(self._target.num_sms), costs(self._target.num_sms * programs)
        if not all(map(math.isfinite, (*alone, *full))) or min(alone[1], full[1]) <= 0:
            return []
        return [Candidate(config, programs, (alone[0], full[0]), (alone[1], full[1]))]

    def _race(self, session: Session) -> None:
        fields = {workload: self._field(workload) for workload in self._workloads}
        fitting = session.survivors(
            self._recipe(workload, config) for workload, field in fields.items() for config in field
        )
        for number, (workload, field) in enumerate(fields.items(), start=1):
            if session.is_over():
                return
            able = [config for config in field if self._recipe(workload, config) in fitting]
            now = choose_by_table(workload.problem, self._target, is_plain=workload.is_plain)
            times = session.race(workload, able, must=[now])
            if times:
                self._times[workload] = times
            session.step("race", number, len(fields))

    def _field(self, workload: Product) -> list[Config]:
        """The model's favourites, each with the splits that the model gives it."""
        problem = workload.problem
        for candidate in self._candidates:
            for is_wide in (True, False):
                found = by_model(
                    problem, [replace(candidate, is_wide=is_wide)], self._target, is_plain=workload.is_plain
                )
                if found is not None:
                    predicted = predicted_us(problem, *found, self._target)
                    config = replace(candidate.config, split_k=found[1])
                    self._plans[workload, candidate.config, is_wide] = _Plan(predicted, config)
        plans = [plan for (of, _, is_wide), plan in self._plans.items() if of == workload and is_wide]
        most = _MOST_RACED if is_main(problem) and workload.is_plain else _MOST_RACED_ELSEWHERE
        return [plan.config for plan in sorted(plans, key=lambda plan: plan.predicted_us)[:most]]

    def _recipe(self, workload: Product, config: Config) -> Recipe:
        family = family_of(workload.problem, config, is_plain=workload.is_plain)
        return Recipe(family, replace(config, split_k=1), self._target)

    def select(self, banned: frozenset[Any]) -> list[Entry]:
        """The entries that lose the least over what was measured, without `banned` configurations.

        The old ones where nothing was measured or nothing is better.
        """
        able = [candidate for candidate in self._candidates if candidate.config not in banned]
        if not self._times or not able:
            return list(self._old)
        wide = [replace(candidate, is_wide=True) for candidate in able]
        kept = self._with_small(keep_few(wide, self._mean, _MOST_WIDE), wide)
        taken = {candidate.config for candidate in kept}
        others = [candidate for candidate in able if candidate.config not in taken]
        kept = keep_few(others, self._mean, MOST_ENTRIES[self._arithmetic], kept)
        now = [
            relative(times, choose_by_table(workload.problem, self._target, is_plain=workload.is_plain))
            for workload, times in self._times.items()
        ]
        is_no_better = self._mean(kept) >= geomean(now)
        may_keep = is_tuned(self._target) and not banned & {config_of(entry) for entry in self._old}
        return list(self._old) if is_no_better and may_keep else [_entry(candidate) for candidate in kept]

    def _with_small(self, kept: tuple[Candidate, ...], wide: list[Candidate]) -> tuple[Candidate, ...]:
        """`kept` with a tile that is not persistent: outputs that boxes cannot store have no other."""
        small = [each for each in wide if not each.config.is_persistent]
        if not small or any(each in small for each in kept):
            return kept
        first = kept[: _MOST_WIDE - 1]
        return (*first, min(small, key=lambda each: self._mean((*first, each))))

    def _mean(self, kept: tuple[Candidate, ...]) -> float:
        return geomean([relative(times, self._would_take(workload, kept)) for workload, times in self._times.items()])

    def _would_take(self, workload: Product, kept: tuple[Candidate, ...]) -> Config | None:
        plans = [self._plans.get((workload, each.config, each.is_wide)) for each in kept]
        return min(
            (plan for plan in plans if plan), key=lambda plan: plan.predicted_us, default=_Plan(0.0, _NOTHING)
        ).config

    def place(self, table: Entry, entries: list[Entry]) -> None:
        """Put `entries` into `table`."""
        if entries:
            table.setdefault("matmul", {}).setdefault("tiles", {})[self._arithmetic] = entries


_NOTHING = Config("none", 0, 0, 0)


def is_modelled(workload: Product, arithmetic: str, target: Target) -> bool:
    """Whether the model, and no rule, chooses for `workload`."""
    problem = workload.problem
    is_this = arithmetic_of(problem) == arithmetic and problem.is_padded_in and has_descriptors(problem, target)
    return is_this and not is_ruled(problem, target)


def is_ruled(problem: Problem, target: Target) -> bool:
    """Whether rules for few rows choose for `problem` where the descriptor kernel runs."""
    has_rules = arithmetic_of(problem) in RULED and target.has_tma
    return has_rules and is_main(problem) and problem.m <= space.BUCKETS[-1]


# The arithmetics whose few rows have rules; with the others the model chooses.
RULED = ("half", "int8", "float8")


def _probe(arithmetic: str, config: Config, num_tiles: int, steps: int) -> Product:
    """A product of `num_tiles` tiles and so many steps of K."""
    across = max(divisor for divisor in range(1, 13) if num_tiles % divisor == 0)
    m, n, k = config.block_m * (num_tiles // across), config.block_n * across, config.block_k * steps
    dtype = _DTYPES[arithmetic]
    precision = arithmetic if dtype == "float32" else "ieee"
    return Product(
        *(max(m, space.BUCKETS[-1] + 1), n, k),
        dtype=dtype,
        precision=precision,
        b_major="n" if arithmetic == "half" else "k",
    )


def _entry(candidate: Candidate) -> Entry:
    config = candidate.config
    shown = {name: getattr(config, name) for name in (*_FIELDS, "is_swapped", "halves")}
    costs = {
        "programs_per_sm": candidate.programs_per_sm,
        "tile_us": [round(each, 3) for each in candidate.tile_us],
        "step_us": [round(each, 4) for each in candidate.step_us],
    }
    assert candidate_of(shown | costs).config == config, "This is a bug."
    return shown | costs | ({"is_wide": True} if candidate.is_wide else {})
