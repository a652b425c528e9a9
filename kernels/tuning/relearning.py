"""Tuning the costs that a choice is made by: random workloads are raced, and costs fitted to all races. Launches nothing.

Comes after everything else of a tuning, since costs are of the members of a catalogue, which the tuning may change.
"""

from __future__ import annotations

import datetime as dt
import itertools
import random
from dataclasses import replace

from kernels.alternatives import alternatives
from kernels.matmul.choice import choose_by_table as product_by_table
from kernels.racing import Times
from kernels.softmax.configs import choose_by_table as rows_by_table
from kernels.tables import install, table_for
from kernels.targets import Target
from kernels.tuning.drawing import draw
from kernels.tuning.learning import key_of, learn
from kernels.tuning.session import Session
from kernels.tuning.settling import Table, recipes
from kernels.workloads import Config, Product, Rows, Workload

# Not the benchmark's, which judges what is learned here.
_SEED = 7


def relearn(
    session: Session, table: Table, trial: Target, ops: tuple[str, ...], num_workloads: int
) -> tuple[Table, Target]:
    """`table` with costs of `trial`'s catalogue, and a target that has it.

    Costs whose part of the table has changed since they were learned are dropped; what is learned replaces the others.

    Args:
        session: begun, for as long as the races may take.
        table: what was selected.
        trial: a target that has it.
        ops: that are tuned.
        num_workloads: how many random workloads to race.
    """
    costs = _still_true(table, table_for(session.target))
    raced = _race(session, trial, ops, num_workloads)
    if raced:
        by_table = {workload: choice_by_table(workload, trial) for workload in raced}
        costs |= learn(raced, by_table, session.target, lambda done, total: session.step("learn", done, total))
        table = table | {"learned": {"date": dt.datetime.now(dt.UTC).date().isoformat(), "workloads": len(raced)}}
    table = {key: value for key, value in table.items() if key != "costs"} | ({"costs": costs} if costs else {})
    learned = replace(trial, name=f"{trial.name}, learned")
    install(learned.name, table)
    return table, learned


def choice_by_table(workload: Workload, target: Target) -> Config | None:
    """What is chosen without costs; None for what is never chosen by them."""
    if isinstance(workload, Product):
        return product_by_table(workload.problem, target, is_plain=workload.is_plain)
    return rows_by_table(workload.problem, target) if isinstance(workload, Rows) else None


def _still_true(table: Table, base: Table) -> Table:
    """The costs of parts that are as they were."""

    def part(of: Table, key: str) -> object:
        op, kind, *_ = key.split()
        found = of.get(op, {})
        return [found.get(name, {}).get(kind) for name in ("tiles", "few_rows")] if op == "matmul" else found

    return {key: costs for key, costs in base.get("costs", {}).items() if part(table, key) == part(base, key)}


def _race(session: Session, trial: Target, ops: tuple[str, ...], num_workloads: int) -> dict[Workload, Times]:
    """Times of random workloads, and of all that the tuning raced, by members of `trial`'s catalogue."""
    generator = random.Random(_SEED)  # noqa: S311 - sizes, no secrets
    drawn = (each for each in draw(generator, session.target) if each.op in ops and key_of(each))
    wanted = list(itertools.islice(drawn, num_workloads))
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


def _members(workload: Workload, times: Times, trial: Target) -> Times:
    able = set(alternatives(workload, trial)) if key_of(workload) else set()
    return {config: us for config, us in times.items() if config in able}
