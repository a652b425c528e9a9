"""Tuning the costs that a choice is made by: random workloads are raced, and costs fitted to all races. Launches nothing.

Comes after everything else of a tuning, since costs are of the members of a catalogue, which the tuning may change.
"""

from __future__ import annotations

import bisect
import datetime as dt
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tilewire.kernels.autotune.alternatives import alternatives, chosen
from tilewire.kernels.autotune.drawing import draw
from tilewire.kernels.autotune.learning import LEAST_LEARNED, key_of, learn
from tilewire.kernels.autotune.racing import Times
from tilewire.kernels.autotune.selection import relative
from tilewire.kernels.autotune.session import Session
from tilewire.kernels.autotune.settling import Table, recipes
from tilewire.kernels.autotune.workloads import Config, Product, Rows, Workload, geomean
from tilewire.kernels.matmul.choice import choose_by_table as product_by_table
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import costs_for, install, table_for
from tilewire.kernels.softmax.configs import choose_by_table as rows_by_table

# Not the benchmark's, which judges what is learned here.
_SEED = 7
# Fewer races do not tell costs that were there before from none.
_LEAST_JUDGED = 12
# What most requests ask for comes first; what is not named, last.
_VALUABLE = (
    "matmul half",
    "matmul ieee",
    "softmax 2 elements",
    "softmax 4 elements",
    "matmul tf32",
    "matmul int8",
    "matmul float8",
    "matmul tf32x3",
)


def relearn(
    session: Session, table: Table, trial: Target, ops: tuple[str, ...], num_workloads: int
) -> tuple[Table, Target]:
    """`table` with costs of `trial`'s catalogue, and a target that has it.

    For each key, whichever costs choose best in the races: those that are learned here, by workloads that they were not
    fitted to; those that the device's table, or its relative's, had before; or none, if the table alone chooses better.

    Args:
        session: begun, for as long as the races may take.
        table: what was selected.
        trial: a target that has it.
        ops: that are tuned.
        num_workloads: how many random workloads to race.
    """
    before = table_for(session.target)
    raced = _race(session, trial, ops, num_workloads)
    judged = _judge(raced, trial)
    costs = {}
    for key, known in before.get("costs", {}).items():
        if key in judged:
            if judged[key]["geomean"] < judged[key]["by_table"]:
                whose = known.get("judged", {}).get("of", before["device"])
                costs[key] = known | {"judged": {"of": whose} | judged[key]}
        elif costs_for(session.target, key) and _part(table, key) == _part(before, key):
            costs[key] = known
    if raced:
        by_table_alone = {workload: choice_by_table(workload, trial) for workload in raced}
        learned = learn(raced, by_table_alone, session.target, lambda done, total: session.step("learn", done, total))
        for key, found in learned.items():
            if key not in costs or key not in judged or found["held_out"]["geomean"] < judged[key]["geomean"]:
                costs[key] = found
        fresh = {key for key, found in learned.items() if costs.get(key) is found}
        date = dt.datetime.now(dt.UTC).date().isoformat()
        told = {"date": date, "workloads": len(raced), "keys": sorted(fresh)}
        earlier = _still_used(before.get("learned", {}), set(costs) - fresh)
        table = table | {"learned": told | ({"earlier": earlier} if earlier else {})}
    table = {key: value for key, value in table.items() if key != "costs"} | ({"costs": costs} if costs else {})
    target = replace(trial, name=f"{trial.name}, learned")
    install(target.name, table)
    return table, target


def _still_used(learned: Table, keys: set[str]) -> list[Table]:
    """What a table said of how costs were learned that it had before, as far as it is of `keys`; latest first."""
    known = [{name: value for name, value in learned.items() if name != "earlier"}, *learned.get("earlier", [])]
    return [each for each in known if each and keys & set(each.get("keys", keys))]


def _judge(raced: Mapping[Workload, Times], trial: Target) -> dict[str, dict[str, float]]:
    """By key that was raced enough: how many times the fastest's time `trial`'s choices take, and its table's alone."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for workload, times in raced.items():
        choices = chosen(workload, trial), choice_by_table(workload, trial)
        if all(choice in times for choice in choices):
            ours, by_table = (relative(times, choice) for choice in choices)
            pairs[key_of(workload)].append((ours, by_table))
    judged = {}
    for key, found in pairs.items():
        if len(found) >= _LEAST_JUDGED:
            geomeans = [round(geomean(each), 4) for each in zip(*found, strict=True)]
            judged[key] = {"workloads": len(found)} | dict(zip(("geomean", "by_table"), geomeans, strict=True))
    return judged


def choice_by_table(workload: Workload, target: Target) -> Config | None:
    """What is chosen without costs; None for what is never chosen by them."""
    if isinstance(workload, Product):
        return product_by_table(workload.problem, target, is_plain=workload.is_plain)
    return rows_by_table(workload.problem, target) if isinstance(workload, Rows) else None


def newly_learned(table: Table, before: Table) -> dict[str, dict[str, float]]:
    """By key whose costs in `table` are not those of `before`: what was held out of learning them."""
    known = before.get("costs", {})
    return {
        key: found["held_out"]
        for key, found in table.get("costs", {}).items()
        if found["held_out"] != known.get(key, {}).get("held_out")
    }


def _part(table: Table, key: str) -> object:
    """What of a table the costs under `key` were learned beside."""
    op, kind, *_ = key.split()
    found = table.get(op, {})
    return [found.get(name, {}).get(kind) for name in ("tiles", "few_rows")] if op == "matmul" else found


def _race(session: Session, trial: Target, ops: tuple[str, ...], num_workloads: int) -> dict[Workload, Times]:
    """Times of random workloads, and of all that the tuning raced, by members of `trial`'s catalogue."""
    generator = random.Random(_SEED)  # noqa: S311 - sizes, no secrets
    drawn = (each for each in draw(generator, session.target) if each.op in ops and key_of(each))
    # Some races tell nothing.
    enough = LEAST_LEARNED + LEAST_LEARNED // 4
    goals = (_LEAST_JUDGED, enough) if table_for(trial).get("costs") else (enough,)
    wanted = in_turn(itertools.islice(drawn, num_workloads), goals)
    if wanted:
        # What a race lacks would be compiled in it.
        session.survivors(recipes(trial, session.target))
    for number, workload in enumerate(wanted, start=1):
        if session.is_over():
            break
        session.race(workload, alternatives(workload, trial))
        session.step("race", number, len(wanted))
    if not wanted:
        return {}
    return {workload: found for workload, times in session.raced.items() if (found := _members(workload, times, trial))}


def in_turn(workloads: Iterable[Workload], goals: Sequence[int]) -> list[Workload]:
    """In the order in which they teach most, wherever time ends.

    Each key is brought to the first goal, a number of its workloads, before any goes on to the second, and past the last
    goal to twice as many again and again; the most valuable first.
    """
    listed = list(workloads)
    doubled = itertools.takewhile(lambda goal: goal < len(listed), (goals[-1] << power for power in itertools.count(1)))
    steps = (*goals, *doubled)
    ranks: Counter[str] = Counter()
    ranked = []
    for workload in listed:
        key = key_of(workload)
        place = _VALUABLE.index(key) if key in _VALUABLE else len(_VALUABLE)
        ranked.append((bisect.bisect_right(steps, ranks[key]), place, workload))
        ranks[key] += 1
    return [workload for _, _, workload in sorted(ranked, key=lambda each: each[:2])]


def _members(workload: Workload, times: Times, trial: Target) -> Times:
    able = set(alternatives(workload, trial)) if key_of(workload) else set()
    return {config: us for config, us in times.items() if config in able}
