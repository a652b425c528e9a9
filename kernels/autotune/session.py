"""One tuning on its way: what it measures with, how long it may, and what it knows already. Knows no op's table."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tilewire.kernels.autotune.compiling import Facts, Outcome, Recipe
from tilewire.kernels.autotune.crew import Failure
from tilewire.kernels.autotune.journal import Journal
from tilewire.kernels.autotune.racing import Bench, Heats, Times, race
from tilewire.kernels.autotune.workloads import Config, Workload, as_line
from tilewire.kernels.runtime.targets import Target

_logger = logging.getLogger(__name__)
_COMPILE_SHARE = 0.6
_FIRST_HEATS = Heats(finalists=8, final_rounds=11)


class Compiles(Protocol):
    """What compiles candidates: `kernels.autotune.compiling.Compiler`, or a pretender."""

    def compile(
        self, recipes: Iterable[Recipe], on_done: Callable[[Recipe, Outcome], None], is_over: Callable[[], bool]
    ) -> None:
        """Compile; `on_done` hears of each, until `is_over`."""


@dataclass(frozen=True)
class Step:
    """How far a tuning is.

    Attributes:
        part: what is tuned.
        stage: what is done for it.
        done: of `total`.
        total: of the stage.
    """

    part: str
    stage: str
    done: int
    total: int


class Session:
    """Compiles, times and remembers for the parts of a tuning.

    Args:
        target: the device.
        bench: what times.
        compiler: what compiles.
        journal: what is known and kept.
        clock: seconds.
        on_step: hears how far it is.
    """

    def __init__(
        self,
        target: Target,
        bench: Bench,
        compiler: Compiles,
        journal: Journal,
        clock: Callable[[], float],
        on_step: Callable[[Step], None],
    ) -> None:
        self.target = target
        self.bench = bench
        self.discarded: list[tuple[str, str]] = []
        self.raced: dict[Workload, Times] = {}
        self.was_cut_short = False
        self._compiler = compiler
        self._journal = journal
        self._clock = clock
        self._on_step = on_step
        self._part = ""
        self._deadline_s = math.inf

    def begin(self, part: str, deadline_s: float) -> None:
        """What follows is for `part` and ends at `deadline_s` by the clock."""
        self._part = part
        self._deadline_s = deadline_s

    def is_over(self) -> bool:
        """Whether the part's time is spent."""
        return self._is_past(self._deadline_s)

    def _is_past(self, end_s: float) -> bool:
        if self._clock() < end_s:
            return False
        self.was_cut_short = True
        return True

    def step(self, stage: str, done: int, total: int) -> None:
        """Say how far the part is."""
        self._on_step(Step(self._part, stage, done, total))

    def survivors(self, recipes: Iterable[Recipe]) -> dict[Recipe, Facts]:
        """Compile what is not known yet; those that compile, fit and spill nothing."""
        wanted = list(dict.fromkeys(recipes))
        outcomes: dict[Recipe, Outcome] = {}
        for recipe in wanted:
            known = self._journal.get(f"facts {recipe.key()}")
            if known is not None:
                outcomes[recipe] = Failure(known) if isinstance(known, str) else Facts(**known)

        def keep(recipe: Recipe, outcome: Outcome) -> None:
            outcomes[recipe] = outcome
            value = outcome.reason if isinstance(outcome, Failure) else asdict(outcome)
            self._journal.put(f"facts {recipe.key()}", value)
            self.step("compile", len(outcomes), len(wanted))

        missing = [recipe for recipe in wanted if recipe not in outcomes]
        now_s = self._clock()
        # What is compiled must also be measured in what is left of the time.
        end_s = now_s + _COMPILE_SHARE * (self._deadline_s - now_s)
        self._compiler.compile(missing, keep, lambda: self._is_past(end_s))
        return {recipe: facts for recipe in wanted if (facts := self._fit(recipe, outcomes.get(recipe))) is not None}

    def _fit(self, recipe: Recipe, outcome: Outcome | None) -> Facts | None:
        if outcome is None:
            return None
        reason = outcome.reason if isinstance(outcome, Failure) else outcome.objection(self.target)
        if reason:
            self.discarded.append((recipe.key(), reason))
        return None if reason or isinstance(outcome, Failure) else outcome

    def race(self, workload: Workload, configs: Sequence[Config], must: Sequence[Config] = ()) -> Times:
        """Times of `configs` on `workload`, which `raced` keeps as well; see `_race`."""
        times = self._race(workload, configs, must)
        self.raced[workload] = self.raced.get(workload, {}) | times
        return times

    def _race(self, workload: Workload, configs: Sequence[Config], must: Sequence[Config]) -> Times:
        """Times of `configs` on `workload`, from the journal when it has all of them.

        Nothing for a workload at which an earlier process ended: a launch that breaks the device's context ends its
        process, and would end this one.
        """
        name = f"race {as_line(workload)}"
        wanted = list(dict.fromkeys((*must, *configs)))
        known = self._journal.get(name)
        if known is not None:
            figures = {_frozen(entry): us for entry, us in zip(known["tried"], known["us"], strict=True)}
            if all(_frozen(asdict(config)) in figures for config in wanted):
                times = {config: figures[_frozen(asdict(config))] for config in wanted}
                return {config: us for config, us in times.items() if us is not None}
        if self._journal.get(f"begun {name}"):
            _logger.warning("%s is left out: the device failed at it", as_line(workload))
            return {}
        self._journal.put(f"begun {name}", True)
        try:
            times = race(self.bench, workload, wanted, must=must, heats=_FIRST_HEATS)
        except KeyboardInterrupt:
            self._journal.put(f"begun {name}", False)
            raise
        self._journal.put(f"begun {name}", False)
        tried = [asdict(config) for config in wanted]
        self._journal.put(name, {"tried": tried, "us": [times.get(config) for config in wanted]})
        return times

    def hot_us(self, workload: Workload, config: Config) -> float:
        """Microseconds of `config` on operands that stay in the cache."""
        name = f"hot {as_line(workload)} {config}"
        known = self._journal.get(name)
        if known is None:
            known = self.bench.hot_us(workload, config)
            self._journal.put(name, known)
        return float(known)


def _frozen(entry: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(entry.items()))
