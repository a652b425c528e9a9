"""Choosing softmax's configuration: the member of the catalogue with the least predicted time. Pure: no torch, no Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.cost_model import Amounts, Tile
from tilewire.kernels.selection.tables import table_name
from tilewire.kernels.softmax.configs import (
    COLUMN,
    MAX_SPLITS,
    MODEL,
    Config,
    Problem,
    choose_interpreted,
    is_long,
    power_of_two,
    tiles_for,
)

# Elements that the threads of a multiprocessor take in a microsecond, for the term `elements`.
_ELEMENTS_PER_US = 256 * 64
# Blocks that are wider than a row by more than this are left out: elements, and times the row's power of two.
_WIDE_BYTES, _WIDE = 1024, 2


def select(problem: Problem, target: Target) -> Config:
    """The configuration for `problem` on `target`.

    Args:
        problem: The softmax.
        target: The device.
    """
    if target.backend == "interpreter":
        return choose_interpreted(problem)
    if not problem.is_contiguous:
        return COLUMN

    def predicted_us(found: tuple[Config, Tile]) -> float:
        return MODEL.us(found[1].costs, amounts_of(problem, found[0], target))

    return min(_possible(problem, target), key=predicted_us)[0]


def explain(problem: Problem, target: Target) -> str:
    """One line: what `select` gives `problem`, and the terms of its predicted time."""
    chosen = select(problem, target)
    words = (
        f"{chosen.kernel} {chosen.block_rows}x{chosen.held_n}, {chosen.num_warps} warps, {chosen.splits} programs a row"
    )
    tile = dict(_possible(problem, target)).get(chosen) if problem.is_contiguous else None
    head = f"{problem.dtype} {problem.rows}x{problem.n} by table {table_name(target)}: {words}"
    if tile is None:
        return f"{head}, the only one for rows that lie across memory"
    amounts = amounts_of(problem, chosen, target)
    return f"{head}, {MODEL.us(tile.costs, amounts):.1f} µs = {MODEL.explained(tile.costs, amounts)}"


def select_invariant(problem: Problem, target: Target) -> Config:
    """A configuration that does not depend on the number of rows: a row's bits are the same among any others."""
    return select(replace(problem, rows=target.num_sms), target)


def possible(problem: Problem, target: Target) -> Iterator[Config]:
    """Every member of the catalogue that can compute `problem`, at every sensible number of programs for a row."""
    return (config for config, _ in _possible(problem, target)) if problem.is_contiguous else iter((COLUMN,))


def _possible(problem: Problem, target: Target) -> Iterator[tuple[Config, Tile]]:
    n, rows = problem.n, problem.rows
    widest = max(_WIDE_BYTES // ITEM_BYTES[problem.dtype], _WIDE * power_of_two(n))
    has_rows = False
    for tile in tiles_for(problem, target):
        config = tile.config
        if config.kernel == "row":
            if n <= config.held_n <= widest:
                has_rows = True
                yield config, tile
        elif config.kernel == "cooperative":
            group = -(-n // config.block_n)
            if 1 < group <= min(MAX_SPLITS, target.num_sms * config.programs_per_sm):
                yield replace(config, splits=group), tile
        elif is_long(problem, target) or not has_rows:
            if config.kernel == "loop":
                yield config, tile
            else:
                most = min(MAX_SPLITS, -(-n // config.block_n), max(2, 4 * target.num_sms // rows))
                yield from ((replace(config, splits=1 << power), tile) for power in range(1, most.bit_length()))


def amounts_of(problem: Problem, config: Config, target: Target) -> Amounts:
    """Returns the amount of each of `MODEL`'s terms in a softmax."""
    read = problem.rows * problem.n * ITEM_BYTES[problem.dtype]
    written = problem.rows * problem.n * ITEM_BYTES[problem.out_dtype]
    is_again = config.kernel in ("loop", "split")
    if config.kernel == "cooperative":
        groups = max(1, target.num_sms * config.programs_per_sm // config.splits)
        exchanges, turns = -(-problem.rows // groups), config.programs_per_sm
        held = exchanges * config.block_n * config.programs_per_sm
    else:
        exchanges = 0
        programs = -(-problem.rows // config.block_rows) * config.splits
        turns = -(-programs // target.num_sms)
        blocks = -(-problem.n // (config.held_n * config.splits))
        held = turns * config.block_rows * config.held_n * blocks * (2 if is_again else 1)
    elements_us = held / _ELEMENTS_PER_US
    return (
        2.0 if config.kernel == "split" else 1.0,
        float(turns),
        float(exchanges),
        (read + written) / target.bytes_per_us,
        read / target.bytes_per_us if is_again else 0.0,
        elements_us,
        0.0 if problem.is_aligned else elements_us,
    )
