"""Tuning the rules by rows: one bucket of rows at a time, a few configurations by number of tiles. Launches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tilewire.kernels.autotune import space
from tilewire.kernels.autotune.compiling import Recipe
from tilewire.kernels.autotune.racing import Times
from tilewire.kernels.autotune.selection import LEAST_GAIN, relative
from tilewire.kernels.autotune.session import Session
from tilewire.kernels.autotune.workloads import Product, geomean
from tilewire.kernels.matmul.choice import by_rule, choose_by_table, split_to_fill
from tilewire.kernels.matmul.configs import Config, is_read_in_pieces
from tilewire.kernels.matmul.members import arithmetic_of, family_of, is_main
from tilewire.kernels.matmul.table import ANY_ROWS, Rule, config_of
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import is_tuned, table_for

Entry = dict[str, Any]
# Rules of one bucket; each further one must gain this much.
_MOST_RULES = {ANY_ROWS: 3}
_LEAST_GAIN = 0.005
_THRESHOLDS = (0.5, 0.75, 1.0, 1.5, 2.0)
_FIELDS = ("kernel", "block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages")
_MORE_FIELDS = {"tma": ("is_persistent", "is_swapped", "halves"), "pointer": ("waves_per_eu",)}


class RulesPart:
    """One arithmetic's entry of `few_rows`: on the descriptor kernel for few rows, on the pointer kernel for all.

    Args:
        arithmetic: a key of the tables.
        kernel: `tma` or `pointer`.
        workloads: what it is tuned for; those that rules do not choose for are left out.
        target: the device.
    """

    op = "matmul"

    def __init__(self, arithmetic: str, kernel: str, workloads: Iterable[Product], target: Target) -> None:
        self.name = f"matmul {arithmetic} {'few rows' if kernel == 'tma' else 'by pointers'}"
        self._arithmetic = arithmetic
        self._kernel = kernel
        self._target = target
        self._buckets = space.BUCKETS if kernel == "tma" else space.POINTER_BUCKETS
        self._workloads = [each for each in workloads if self._is_ours(each)]
        self._old = table_for(target).get("matmul", {}).get("few_rows", {}).get(arithmetic, [])
        self._times: dict[int, dict[Product, Times]] = {bucket: {} for bucket in self._buckets}
        self._able: dict[int, list[Config]] = {}

    def _is_ours(self, workload: Product) -> bool:
        problem = workload.problem
        if arithmetic_of(problem) != self._arithmetic:
            return False
        if self._kernel == "pointer":
            return is_read_in_pieces(problem)
        return problem.is_padded_in and is_main(problem) and problem.m <= self._buckets[-1]

    def _bucket(self, workload: Product) -> int:
        return next(bucket for bucket in self._buckets if workload.problem.m <= bucket)

    def measure(self, session: Session) -> None:
        """Compile candidates and race them on each workload."""
        candidates = {bucket: self._candidates(bucket) for bucket in self._buckets}
        wanted = [(each, config) for each in self._workloads for config in candidates[self._bucket(each)]]
        fitting = session.survivors(self._recipe(workload, config) for workload, config in wanted)
        for bucket, configs in candidates.items():
            ours = [each for each in self._workloads if self._bucket(each) == bucket]
            self._able[bucket] = [
                config for config in configs if all(self._recipe(workload, config) in fitting for workload in ours)
            ]
        for number, workload in enumerate(self._workloads, start=1):
            if session.is_over():
                return
            bucket, problem = self._bucket(workload), workload.problem
            field = [split_to_fill(problem, config, self._target) for config in self._able[bucket]]
            now = choose_by_table(problem, self._target, is_plain=workload.is_plain)
            times = session.race(workload, field, must=[now])
            if times:
                self._times[bucket][workload] = times
            session.step("race", number, len(self._workloads))

    def _candidates(self, bucket: int) -> list[Config]:
        make = space.few_rows if self._kernel == "tma" else space.pointer
        old = [config_of(entry) for entry in self._old if entry["max_m"] == bucket]
        return list(dict.fromkeys([*old, *make(self._arithmetic, bucket, self._target)]))

    def _recipe(self, workload: Product, config: Config) -> Recipe:
        whole = split_to_fill(workload.problem, config, self._target)
        family = family_of(workload.problem, whole, is_plain=workload.is_plain)
        return Recipe(family, replace(config, split_k=1), self._target)

    def select(self, banned: frozenset[Any]) -> list[Entry]:
        """Rules that lose the least, without `banned` configurations; a bucket without measurements keeps its old ones."""
        kept = {bucket: self._rules(bucket, banned) for bucket in self._buckets}
        old = [entry for entry in self._old if not kept.get(entry["max_m"]) and config_of(entry) not in banned]
        new = [_entry(rule) for rules in kept.values() for rule in rules]
        return sorted([*old, *new], key=lambda entry: entry["max_m"])

    def _rules(self, bucket: int, banned: frozenset[Any]) -> list[Rule]:
        measured = self._times[bucket]
        configs = [config for config in self._able.get(bucket, ()) if config not in banned]
        if not measured or not configs:
            return []

        def loss(rules: list[Rule]) -> float:
            return geomean(
                [relative(times, by_rule(each.problem, rules, self._target)) for each, times in measured.items()]
            )

        rules = min(([Rule(bucket, 0, config)] for config in configs), key=loss)
        thresholds = [round(self._target.num_sms * share) for share in _THRESHOLDS]
        while len(rules) < _MOST_RULES.get(bucket, 2):
            # Rules are asked in order: what wants more tiles comes first.
            wider = [each for each in thresholds if each > rules[0].min_tiles]
            trials = [[Rule(bucket, least, config), *rules] for least in wider for config in configs]
            best = min(trials, key=loss, default=rules)
            if loss(best) > loss(rules) * (1 - _LEAST_GAIN):
                break
            rules = best
        now = [
            relative(times, choose_by_table(each.problem, self._target, is_plain=each.is_plain))
            for each, times in measured.items()
        ]
        is_no_better = loss(rules) > geomean(now) * (1 - LEAST_GAIN)
        return [] if is_no_better and is_tuned(self._target) and self._has_old(bucket, banned) else rules

    def _has_old(self, bucket: int, banned: frozenset[Any]) -> bool:
        return any(entry["max_m"] == bucket and config_of(entry) not in banned for entry in self._old)

    def place(self, table: Entry, entries: list[Entry]) -> None:
        """Put `entries` into `table`."""
        if entries:
            table.setdefault("matmul", {}).setdefault("few_rows", {})[self._arithmetic] = entries


def _entry(rule: Rule) -> Entry:
    config = rule.config
    names = (*_FIELDS, *_MORE_FIELDS[config.kernel])
    return {"max_m": rule.max_m, "min_tiles": rule.min_tiles, **{name: getattr(config, name) for name in names}}
