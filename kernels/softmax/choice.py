"""Choosing softmax's configuration: the least predicted time, else the table. Pure: no torch, no Triton.

Only members of the catalogue are given, whatever a table says. Knows how a softmax is `Work`;
`kernels.selection.cost_model` knows what work costs.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.cost_model import Costs, Forecast, Work
from tilewire.kernels.selection.tables import costs_for
from tilewire.kernels.softmax.configs import (
    ITEM_BYTES,
    MAX_SPLITS,
    Config,
    Problem,
    choose_by_table,
    members,
    power_of_two,
    without_team,
)

_FIELDS = ("kernel", "block_rows", "block_n", "num_warps")


def choose(problem: Problem, target: Target) -> Config:
    """The configuration for `problem` on `target`.

    Args:
        problem: the softmax.
        target: the device.
    """
    if not problem.is_contiguous or target.backend == "interpreter":
        return choose_by_table(problem, target)
    by_table = choose_by_table(problem, target)
    return by_time(problem, by_table, target) or by_table


def choose_invariant(problem: Problem, target: Target) -> Config:
    """A configuration that does not depend on the number of rows: a row's bits are the same among any others."""
    return choose(replace(problem, rows=target.num_sms), target)


def by_time(problem: Problem, by_table: Config, target: Target) -> Config | None:
    """The member of the catalogue with the least predicted time; None where costs do not even tell that of `by_table`."""
    key = key_of(problem)
    found = costs_for(target, key)
    if found is None or work_size(problem) > found["most"]:
        return None
    costs = _costs(key, target)
    if entry_of(by_table) not in costs:
        return None
    best_us, best = math.inf, None
    for config in possible(problem, target):
        known = costs.get(entry_of(config))
        if known is not None:
            us = Forecast(work_of(problem, config), known, target.num_sms).us(config.splits)
            if us < best_us:
                best_us, best = us, config
    return best


def possible(problem: Problem, target: Target) -> Iterator[Config]:
    """Every member of the catalogue that can compute `problem`, at every sensible number of programs for a row."""
    n, rows = problem.n, problem.rows
    for config in _built_for(replace(problem, rows=1, n=1), target):
        if config.kernel == "split":
            most = min(MAX_SPLITS, -(-n // config.block_n), max(2, 4 * target.num_sms // rows))
            splits = {1 << power for power in range(1, most.bit_length())} | {without_team(problem, target).splits}
            yield from (replace(config, splits=each) for each in sorted(splits) if each > 1)
        elif config.kernel == "team":
            team = -(-n // config.block_n)
            has_room = team <= min(MAX_SPLITS, target.num_sms * config.programs_per_sm)
            # Two binaries, for teams of up to 16 and for larger ones, stand in the list with sizes of their own.
            if has_room and (team <= 16) == (config.splits <= 16):
                yield replace(config, splits=team)
        elif config.kernel != "row" or n <= config.block_n <= max(
            1024 // ITEM_BYTES[problem.dtype], 2 * power_of_two(n)
        ):
            yield config


def _built_for(family: Problem, target: Target) -> tuple[Config, ...]:
    return by_family(target).get(family, ())


@functools.cache
def by_family(target: Target) -> dict[Problem, tuple[Config, ...]]:
    """`members`, in order, by what their binaries depend on. Listing the catalogue fills it, so that no request does."""
    found: dict[Problem, dict[Config, None]] = defaultdict(dict)
    for shown, config in members(target):
        found[replace(shown, rows=1, n=1)][config] = None
    return {family: tuple(configs) for family, configs in found.items()}


def key_of(problem: Problem) -> str:
    """What the costs of rows like this are kept by."""
    return f"softmax {ITEM_BYTES[problem.dtype]} {'pieces' if problem.is_aligned else 'elements'}"


def entry_of(config: Config) -> Config:
    """What is fitted on its own: a configuration without its splits."""
    return replace(config, splits=1)


@functools.cache
def _costs(key: str, target: Target) -> dict[Config, Costs]:
    found = costs_for(target, key)
    entries = found["entries"] if found else ()
    return {_config_of(entry): Costs.of(entry) for entry in entries}


def _config_of(entry: dict[str, Any]) -> Config:
    return Config(**{name: entry[name] for name in _FIELDS}, programs_per_sm=entry["team_per_sm"])


def work_size(problem: Problem) -> int:
    """Bytes read and written: up to how many costs were fitted is kept with them."""
    return problem.rows * problem.n * (ITEM_BYTES[problem.dtype] + ITEM_BYTES[problem.out_dtype])


def work_of(problem: Problem, config: Config) -> Work:
    """What the model sees of a softmax under a configuration."""
    item_bytes = ITEM_BYTES[problem.dtype]
    tiles, steps = -(-problem.rows // config.block_rows), -(-problem.n // config.block_n)
    elements = problem.rows * problem.n
    return Work(
        tiles=tiles,
        steps=steps,
        read_mb=elements * item_bytes / 1e6,
        written_mb=elements * ITEM_BYTES[problem.out_dtype] / 1e6,
        step_mb=config.block_rows * config.block_n * item_bytes / 1e6,
        rows_filled=problem.rows / (tiles * config.block_rows),
        columns_filled=problem.n / (steps * config.block_n),
        a_across=float(problem.n * item_bytes % 4 != 0),
        logs=(math.log2(problem.rows), math.log2(problem.n), 8.0),
    )
