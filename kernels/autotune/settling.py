"""From what the parts of a tuning measured to a table whose every binary compiles, and what it gains. Writes no file."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tilewire.kernels.add.configs import members as add_members
from tilewire.kernels.autotune.alternatives import chosen
from tilewire.kernels.autotune.compiling import Recipe
from tilewire.kernels.autotune.session import Session
from tilewire.kernels.autotune.workloads import Workload, geomean
from tilewire.kernels.matmul.members import members as matmul_members
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import install, table_for
from tilewire.kernels.softmax.configs import Config as SoftmaxConfig
from tilewire.kernels.softmax.configs import members as softmax_members

Table = dict[str, Any]
_ATTEMPTS = 4
_COMPARE_ROUNDS = 11
_numbers = itertools.count()


class Part(Protocol):
    """One entry of a table on its way: measured once, selected as often as needed."""

    name: str
    op: str

    def measure(self, session: Session) -> None:
        """Compile and time candidates, until the session says that it is over."""

    def select(self, banned: frozenset[Any]) -> list[Any]:
        """The entries to keep, without `banned` configurations."""

    def place(self, table: Table, entries: list[Any]) -> None:
        """Put `entries` into `table`."""


@dataclass(frozen=True)
class Gain:
    """One workload before and after: 1 means that the choice is the same, 1.1 that it takes a tenth less."""

    workload: Workload
    before_us: float
    after_us: float

    @property
    def ratio(self) -> float:
        """Time before over time after."""
        return self.before_us / self.after_us


@dataclass(frozen=True)
class Summary:
    """The gains of one op."""

    op: str
    num_workloads: int
    num_changed: int
    geomean: float
    least: float
    most: float


def settle(session: Session, parts: Sequence[Part]) -> tuple[Table, Target]:
    """The new table, every new binary of it compiled; and a target that has it, under a name of its own.

    What does not compile in all the layouts that its entry stands for is banned and the parts select again. An op that
    finds nothing in a few attempts keeps what it had.
    """
    target = session.target
    known = set(recipes(target, target))
    banned: set[Any] = set()
    failed_ops: set[str] = set()
    session.begin("check", float("inf"))
    while True:
        for _ in range(_ATTEMPTS):
            able = [part for part in parts if part.op not in failed_ops]
            table = _assembled(able, table_for(target), frozenset(banned))
            trial = replace(target, name=f"{target.name} ({next(_numbers)})")
            install(trial.name, table)
            fresh = [recipe for recipe in dict.fromkeys(recipes(trial, target)) if recipe not in known]
            fitting = session.survivors(fresh)
            failing = [recipe for recipe in fresh if recipe not in fitting]
            if not failing:
                return table, trial
            banned |= {_bare(recipe.config) for recipe in failing}
        assert failed_ops < {"matmul", "softmax", "add"}, "This is a bug."
        failed_ops |= {_op_of(recipe) for recipe in failing}


def _assembled(parts: Iterable[Part], base: Table, banned: frozenset[Any]) -> Table:
    table = copy.deepcopy(base)
    # Every reader of a table finds these, with or without entries.
    for key in ("few_rows", "tiles"):
        table.setdefault("matmul", {}).setdefault(key, {})
    for part in parts:
        part.place(table, part.select(banned))
    return table


def recipes(chooser: Target, builder: Target) -> Iterator[Recipe]:
    """Every binary that `chooser` can be asked for, as built for `builder`."""
    yield from (Recipe(*member, builder) for member in matmul_members(chooser))
    yield from (Recipe(*member, builder) for member in softmax_members(chooser))
    yield from (Recipe(*member, builder) for member in add_members(chooser))


def _bare(config: Any) -> Any:
    return replace(config, splits=1) if isinstance(config, SoftmaxConfig) else config


def _op_of(recipe: Recipe) -> str:
    return str(recipe.variants()[0].kernel.__name__).split("_")[0]


def compare(session: Session, workloads: Sequence[Workload], trial: Target) -> list[Gain]:
    """What each workload gains: the choices before and after in turns; workloads whose choice stays gain nothing."""
    gains = []
    for number, workload in enumerate(workloads, start=1):
        if session.is_over():
            break
        before, after = chosen(workload, session.target), chosen(workload, trial)
        if before == after:
            gains.append(Gain(workload, 1.0, 1.0))
        else:
            times = session.bench.in_turns_us(workload, [before, after], _COMPARE_ROUNDS)
            gains.append(Gain(workload, *times))
        session.step("compare", number, len(workloads))
    return gains


def summarise(gains: Iterable[Gain]) -> list[Summary]:
    """By op: how many, and the geomean, the least and the most of the gains."""

    def op(gain: Gain) -> str:
        return gain.workload.op

    summaries = []
    for name, group in itertools.groupby(sorted(gains, key=op), key=op):
        ratios = [gain.ratio for gain in group]
        changed = sum(ratio != 1.0 for ratio in ratios)
        summaries.append(Summary(name, len(ratios), changed, geomean(ratios), min(ratios), max(ratios)))
    return summaries


def measure_all(
    session: Session, parts: Sequence[Part], weights: Sequence[float], budget_s: float, clock: Callable[[], float]
) -> None:
    """Have each part measure for its share of what is left of the budget, so that what one saves the next has."""
    end_s = clock() + budget_s
    for number, part in enumerate(parts):
        share = weights[number] / sum(weights[number:])
        session.begin(part.name, clock() + share * max(0.0, end_s - clock()))
        part.measure(session)
