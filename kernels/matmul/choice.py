"""Choosing among measured configurations: a model of time, and the tables it reads. Pure: no torch, no Triton.

For tall products every configuration of the table is a candidate, at every split of K; the model predicts the time of
each from what its tiles and steps were measured to cost, and the fastest wins. Products of few rows are limited by
reading `b` and take the table's rule for them. Both only give members of a finite set.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from kernels.matmul.configs import (
    Config,
    Problem,
    cdiv,
    choose_fma,
    choose_matrix,
    for_amd,
    resolve_precision,
    split_k_for,
)
from kernels.tables import table_for
from kernels.targets import Target

# Elements of a tile for each thread, above which a tile is not split.
MAX_SPLIT_ELEMENTS = 64
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_FIELDS = frozenset(Config.__dataclass_fields__)


@dataclass(frozen=True)
class Candidate:
    """A configuration and what it was measured to cost.

    Attributes:
        config: with one split.
        programs_per_sm: how many run on one multiprocessor at a time.
        tile_us: start and end of one tile, with one program on each multiprocessor, and with all.
        step_us: one step of K, likewise.
    """

    config: Config
    programs_per_sm: int
    tile_us: tuple[float, float]
    step_us: tuple[float, float]


def choose(problem: Problem, target: Target) -> Config:
    """The configuration for `problem` on `target`."""
    if target.backend == "interpreter":
        # Small blocks reach every tail and loop of the kernels at sizes that an interpreter can do.
        split_k = 2 if problem.k > 64 else 1
        if problem.is_padded_in:
            halves = 1 if split_k > 1 else 2
            return Config("tma", 16, 32, 32, 2, split_k, is_persistent=True, halves=halves)
        return Config("pointer", 16, 16, 32, 2, split_k)
    measured = choose_measured(problem, target)
    if measured is not None:
        return measured
    is_scalar = problem.dtype == "float32" and resolve_precision(problem.precision, target) == "ieee"
    config = choose_fma(problem) if is_scalar else choose_matrix(problem)
    config = replace(config, split_k=split_k_for(problem, config, target))
    return for_amd(config) if target.backend == "hip" else config


def arithmetic_of(problem: Problem) -> str:
    """The key of the tables: what the matrix unit multiplies."""
    if problem.dtype == "float32":
        return problem.precision
    return {"int8": "int8", "float8_e4m3fn": "float8", "float8_e5m2": "float8"}.get(problem.dtype, "half")


def choose_measured(problem: Problem, target: Target) -> Config | None:
    """The best measured configuration of the descriptor kernel; None where it cannot run or none was measured."""
    arithmetic = arithmetic_of(problem)
    rules = _rules(target).get(arithmetic, ())
    if arithmetic == "ieee":
        is_for_rules = problem.is_aligned_in and problem.batch == 1 and bool(rules) and problem.m <= rules[-1][0]
        return _by_rule(problem, rules, target) if is_for_rules else None
    is_k_major = problem.a_major == "k" and problem.b_major == "k"
    if not (target.has_tma and problem.is_padded_in) or not (arithmetic == "half" or is_k_major):
        return None
    if problem.batch == 1 and rules and problem.m <= rules[-1][0]:
        return _by_rule(problem, rules, target)
    return _by_model(problem, _candidates(target).get(arithmetic, ()), target)


def _by_model(problem: Problem, candidates: tuple[Candidate, ...], target: Target) -> Config | None:
    choices = [(each, split) for each in candidates for split in SPLITS if _is_sensible(problem, each, split, target)]
    if not choices:
        return None
    best, split_k = min(choices, key=lambda choice: predicted_us(problem, choice[0], choice[1], target))
    return _split(best.config, split_k)


def predicted_us(problem: Problem, candidate: Candidate, split_k: int, target: Target) -> float:
    """The model: waves of programs, each a tile's cost and its steps'; at least the time of reading and writing."""
    costs = table_for(target)["model"]
    config = candidate.config
    steps = cdiv(cdiv(problem.k, config.block_k), split_k)
    full = candidate.tile_us[1] + steps * candidate.step_us[1]
    alone = candidate.tile_us[0] + steps * candidate.step_us[0]
    waves, rest = divmod(config.tiles(problem) * split_k, target.num_sms * candidate.programs_per_sm)
    last = 0.0 if rest == 0 else alone if rest <= target.num_sms else full
    bytes_us = problem.min_bytes / (costs["bandwidth_gbs"] * 1e3)
    reduce_us = 0.0
    if split_k > 1:
        # The last program of a tile reads all parts; the more warps it has, the more it has in flight.
        parts_bytes = split_k * config.block_m * config.block_n * 4
        reduce_us = float(costs["reduce_us"] + parts_bytes / (costs["reduce_gbs_per_warp"] * config.num_warps * 1e3))
    return float(max(waves * full + last, bytes_us) + reduce_us)


def _is_sensible(problem: Problem, candidate: Candidate, split_k: int, target: Target) -> bool:
    config = candidate.config
    if split_k == 1:
        return True
    # Adding up the parts takes as many registers again as the tile.
    is_large = config.block_m * config.block_n > MAX_SPLIT_ELEMENTS * 32 * config.num_warps
    # Parts that wait for a second wave cost more than the idle multiprocessors that they would use.
    too_many = config.tiles(problem) * split_k > target.num_sms * candidate.programs_per_sm
    return not (is_large or too_many or config.is_persistent) and cdiv(problem.k, config.block_k) >= 2 * split_k


def _by_rule(problem: Problem, rules: tuple[tuple[int, int, Config], ...], target: Target) -> Config:
    """The first rule for so few rows whose tiles are enough, split until they occupy the device."""
    fitting = [(least, config) for most_rows, least, config in rules if problem.m <= most_rows]
    closest = min(most_rows for most_rows, _, _ in rules if problem.m <= most_rows)
    fitting = [(least, config) for most_rows, least, config in rules if most_rows == closest]
    config = next(config for least, config in fitting if config.tiles(problem) >= least)
    steps = cdiv(problem.k, config.block_k)
    wanted = (target.num_sms * 7 // 8) / config.tiles(problem)
    possible = [split for split in SPLITS if split == 1 or steps >= 2 * split]
    return _split(config, next((split for split in possible if split >= wanted), possible[-1]))


def _split(config: Config, split_k: int) -> Config:
    return config if split_k == 1 else replace(config, split_k=split_k, halves=1)


@functools.cache
def _candidates(target: Target) -> dict[str, tuple[Candidate, ...]]:
    entries = table_for(target).get("matmul", {}).get("tiles", {})
    return {key: tuple(_candidate(entry) for entry in entries[key] if "step_us" in entry) for key in entries}


def _candidate(entry: dict[str, Any]) -> Candidate:
    return Candidate(config_of(entry), entry["programs_per_sm"], tuple(entry["tile_us"]), tuple(entry["step_us"]))


@functools.cache
def _rules(target: Target) -> dict[str, tuple[tuple[int, int, Config], ...]]:
    """By arithmetic: (most rows, fewest tiles, configuration), fewest rows first."""
    entries = table_for(target).get("matmul", {}).get("few_rows", {})
    return {
        key: tuple((entry["max_m"], entry.get("min_tiles", 0), config_of(entry)) for entry in entries[key])
        for key in entries
    }


def config_of(entry: dict[str, Any]) -> Config:
    """The configuration that an entry of a table describes."""
    return Config(**{name: value for name, value in entry.items() if name in _FIELDS})
