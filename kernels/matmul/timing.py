"""Choosing a product's configuration by its predicted time, from fitted costs. Pure: no torch, no Triton.

Only members of the catalogue are candidates, whatever a table says. Knows how a product is `Work`;
`kernels.selection.cost_model` knows what work costs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from tilewire.kernels.matmul.configs import ITEM_BYTES, Config, Problem, cdiv, is_read_in_pieces
from tilewire.kernels.matmul.members import (
    FEW_ROWS,
    MOST_WAVES,
    SPLITS,
    arithmetic_of,
    built_for,
    can_split,
    family_of,
    stores_boxes,
)
from tilewire.kernels.matmul.table import config_of
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.cost_model import Costs, Forecast, Work
from tilewire.kernels.selection.tables import costs_for

# Past the fastest split of a configuration, splits whose time is this many times it end the search.
_PAST_BEST = 1.2
# Where more splits are possible, those with less than this share of a program for each multiprocessor are not tried.
_LEAST_SHARE = 4


@dataclass(frozen=True)
class _Able:
    """A configuration, its costs, and whether it has binaries for whole tiles and for tiles that programs share."""

    config: Config
    costs: Costs
    is_whole: bool
    is_shared: bool


def by_time(problem: Problem, target: Target, *, is_plain: bool) -> Config | None:
    """The member of the catalogue with the least predicted time; None where no costs were fitted for such products.

    Args:
        problem: the product.
        target: the device.
        is_plain: whether nothing follows the product.
    """
    costs = costs_for(target, key_of(problem))
    if costs is None or not 0 < problem.flops <= costs["most"]:
        return None
    best_us, best, best_split = math.inf, None, 1
    for able in _all_able(problem, target, is_plain=is_plain):
        work = work_of(problem, able.config, is_plain=is_plain)
        forecast = Forecast(work, able.costs, target.num_sms)
        least_us = math.inf
        for split_k in _splits(work, able, target):
            us = forecast.us(split_k)
            if us < best_us:
                best_us, best, best_split = us, able.config, split_k
            if us > _PAST_BEST * least_us:
                break
            least_us = min(least_us, us)
    return best and replace(best, split_k=best_split)


def _splits(work: Work, able: _Able, target: Target) -> tuple[int, ...]:
    """The splits that may be the best: enough to occupy the device if they can, and not too many."""
    if not able.is_shared:
        return (1,)
    most = max(1, min(work.steps // 2, MOST_WAVES * target.num_sms // work.tiles, SPLITS[-1]))
    least = min(most // 4, target.num_sms // (_LEAST_SHARE * work.tiles))
    return _between(least if able.is_whole else max(1, least), most)


@functools.cache
def _between(least: int, most: int) -> tuple[int, ...]:
    """The splits above `least` up to `most`."""
    return tuple(split for split in SPLITS if least < split <= most)


def key_of(problem: Problem) -> str:
    """What the costs of products like this are kept by."""
    return f"matmul {arithmetic_of(problem)}"


def entry_of(problem: Problem, config: Config) -> tuple[str, Config]:
    """What is fitted on its own: a configuration with one split, and how the pointer kernel reads and writes."""
    store = ("pieces" if is_read_in_pieces(problem) else "elements") if config.kernel == "pointer" else ""
    return store, replace(config, split_k=1)


def _all_able(problem: Problem, target: Target, *, is_plain: bool) -> tuple[_Able, ...]:
    """The configurations that have a binary for `problem`."""
    facts = (problem.is_aligned_in, problem.is_aligned_out, problem.is_padded_in, problem.is_boxed_out)
    kind = (problem.dtype, problem.out_dtype, problem.a_major, problem.b_major, problem.precision, *facts)
    return _able(kind, problem.batch > 1, problem.m > FEW_ROWS, is_plain, target)


@functools.lru_cache(maxsize=4096)
def _able(
    kind: tuple[Any, ...], is_batched: bool, has_many_rows: bool, is_plain: bool, target: Target
) -> tuple[_Able, ...]:
    """The same, by what families depend on. That is looked up, since working it out takes as long as choosing."""
    problem = Problem(FEW_ROWS + 1 if has_many_rows else 1, 1, 1, 2 if is_batched else 1, *kind)
    found = []
    for probe in _PROBES if problem.is_padded_in and problem.is_aligned_out else _PROBES[:1]:
        whole, shared = (family_of(problem, replace(probe, split_k=split), is_plain=is_plain) for split in (1, 2))
        built, built_shared = built_for(whole, target), built_for(shared, target)
        for store, config, costs in _timed(key_of(problem), target):
            is_shared = config in built_shared and can_split(config)
            if config.kernel == whole.kernel and store in ("", whole.store) and (config in built or is_shared):
                found.append(_Able(config, costs, config in built, is_shared))
    return tuple(found)


# Any configuration of each kernel: what family a product is of depends on no more.
_PROBES = (Config("pointer", 16, 16, 16), Config("tma", 16, 16, 16))


@functools.cache
def _timed(key: str, target: Target) -> tuple[tuple[str, Config, Costs], ...]:
    found = costs_for(target, key)
    entries = found["entries"] if found else ()
    return tuple((entry.get("store", ""), config_of(entry), Costs.of(entry)) for entry in entries)


def work_of(problem: Problem, config: Config, *, is_plain: bool) -> Work:
    """What the model sees of a product under a configuration."""
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    item_bytes, out_bytes = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.out_dtype]
    rows, columns = cdiv(m, config.block_m), cdiv(n, config.block_n)
    rows_filled, columns_filled = m / (rows * config.block_m), n / (columns * config.block_n)
    loaded = config.block_k * (config.block_m * rows_filled + config.block_n * columns_filled)
    if config.kernel == "pointer":
        loose = (0.0, 0.0) if problem.is_aligned_out else (1.0, 1.0)
    else:
        loose = (float(not stores_boxes(problem, config)), 1.0)
    return Work(
        rows * columns * batch,
        cdiv(k, config.block_k),
        (m + n) * k * batch * item_bytes / 1e6,
        m * n * batch * out_bytes / 1e6,
        loaded * item_bytes / 1e6,
        config.block_m * config.block_n * 4 / 1e6,
        rows_filled,
        columns_filled,
        float(not is_plain),
        float(problem.a_major != "k"),
        float(problem.b_major != "n"),
        float(batch > 1),
        loose,
        (math.log2(m), math.log2(n), math.log2(k)),
    )
