"""What a device's table says of matmul, as values. Pure: no torch, no Triton; knows no problem."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import table_for

# The `max_m` of a rule for any number of rows: a table whose rules end with it needs no other configurations.
ANY_ROWS = 1 << 31
_FIELDS = frozenset(Config.__dataclass_fields__)


@dataclass(frozen=True)
class Candidate:
    """A configuration and what it was measured to cost.

    Attributes:
        config: with one split.
        programs_per_sm: how many run on one multiprocessor at a time.
        tile_us: start and end of one tile, with one program on each multiprocessor, and with all.
        step_us: one step of K, likewise.
        is_wide: whether its binary is built for every layout and store, not only for those that most products have.
    """

    config: Config
    programs_per_sm: int
    tile_us: tuple[float, float]
    step_us: tuple[float, float]
    is_wide: bool = False


@dataclass(frozen=True)
class Rule:
    """Products of up to `max_m` rows that are `min_tiles` tiles or more of `config` run with it."""

    max_m: int
    min_tiles: int
    config: Config


@functools.cache
def candidates_of(target: Target) -> dict[str, tuple[Candidate, ...]]:
    """By arithmetic, those that were measured."""
    entries = table_for(target).get("matmul", {}).get("tiles", {})
    return {key: tuple(candidate_of(entry) for entry in entries[key] if "step_us" in entry) for key in entries}


def candidate_of(entry: dict[str, Any]) -> Candidate:
    """The candidate that an entry of a table describes."""
    costs = (tuple(entry["tile_us"]), tuple(entry["step_us"]))
    return Candidate(config_of(entry), entry["programs_per_sm"], *costs, entry.get("is_wide", False))


@functools.cache
def rules_of(target: Target) -> dict[str, tuple[Rule, ...]]:
    """By arithmetic, fewest rows first."""
    entries = table_for(target).get("matmul", {}).get("few_rows", {})
    return {key: tuple(rule_of(entry) for entry in entries[key]) for key in entries}


def are_for_all(rules: Sequence[Rule]) -> bool:
    """Whether any number of rows has a rule."""
    return bool(rules) and rules[-1].max_m >= ANY_ROWS


def rule_of(entry: dict[str, Any]) -> Rule:
    """The rule that an entry of a table describes."""
    return Rule(entry["max_m"], entry.get("min_tiles", 0), config_of(entry))


def config_of(entry: dict[str, Any]) -> Config:
    """The configuration that an entry of a table describes."""
    return Config(**{name: value for name, value in entry.items() if name in _FIELDS})
