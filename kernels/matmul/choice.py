"""Choosing among measured configurations: a model of time, and the tables it reads. Pure: no torch, no Triton.

For tall products every configuration of the table is a candidate, at every split of K; the model predicts the time of
each from what its tiles and steps were measured to cost, and the fastest wins. Products of few rows are limited by
reading `b` and take the table's rule for them. Both only give members of a finite set.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernels.matmul.configs import (
    OUT_DTYPES,
    PRECISIONS,
    Config,
    Family,
    Problem,
    cdiv,
    choose_fma,
    choose_matrix,
    fma_configs,
    for_amd,
    is_read_in_pieces,
    matrix_configs,
    resolve_precision,
    split_k_for,
)
from kernels.tables import table_for
from kernels.targets import Target

# Elements of a tile for each thread, above which a tile is not split.
MAX_SPLIT_ELEMENTS = 64
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
# Up to here a descriptor does not pay for storing.
FEW_ROWS = 64
# Small blocks reach every tail and loop of the kernels at sizes that an interpreter can do.
_INTERPRETED = Config("pointer", 16, 16, 32, 2)
_INTERPRETED_TMA = Config("tma", 16, 32, 32, 2, is_persistent=True, halves=2)
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


def choose(problem: Problem, target: Target, *, is_plain: bool = True) -> Config:
    """The configuration for `problem` on `target`: with its family, a member of `members(target)`.

    Args:
        problem: the product.
        target: the device.
        is_plain: whether nothing follows the product.
    """
    if target.backend == "interpreter":
        is_boxed = stores_boxes(problem, _INTERPRETED_TMA)
        split_k = 2 if problem.k > 64 and not is_boxed else 1
        has_boxes = problem.is_padded_in and problem.is_aligned_out
        return replace(_INTERPRETED_TMA if has_boxes else _INTERPRETED, split_k=split_k)
    measured = choose_measured(problem, target, is_plain=is_plain)
    if measured is not None:
        return measured
    config = (choose_fma if _is_scalar(problem.dtype, problem.precision, target) else choose_matrix)(problem)
    config = replace(config, split_k=split_k_for(problem, config, target))
    return for_amd(config) if target.backend == "hip" else config


def choose_invariant(problem: Problem, target: Target) -> Config:
    """A configuration that depends neither on the rows nor on the number of products, and does not split K.

    A row's sums then are the same, bit for bit, whatever it is computed with. Also a member of `members(target)`.

    Args:
        problem: the product.
        target: the device.
    """
    shown = replace(problem, m=4 * FEW_ROWS, batch=1)
    if target.backend == "interpreter":
        return replace(choose(shown, target), split_k=1)
    if problem.is_padded_in and _has_descriptors(problem, target):
        # Those that are built for every store, since that does depend on the rows.
        candidates = _candidates(target).get(arithmetic_of(problem), ())
        every = [each for each in candidates if each.is_wide and not each.config.is_persistent]
        if every:
            return min(every, key=lambda each: predicted_us(shown, each, 1, target)).config
    config = (choose_fma if _is_scalar(problem.dtype, problem.precision, target) else choose_matrix)(shown)
    return for_amd(config) if target.backend == "hip" else config


def stores_boxes(problem: Problem, config: Config) -> bool:
    """Whether the descriptor kernel also stores through a descriptor. Few rows are as well stored without."""
    has_many_rows = problem.m > FEW_ROWS or problem.batch > 1
    return problem.is_boxed_out and _is_default_out(problem) and config.split_k == 1 and has_many_rows


def family_of(problem: Problem, config: Config, *, is_plain: bool) -> Family:
    """What the binary for `problem` depends on beside `config`.

    Args:
        problem: the product.
        config: how it is computed.
        is_plain: whether nothing follows it.
    """
    majors = (problem.a_major, problem.b_major)
    if config.kernel == "tma":
        is_boxed = stores_boxes(problem, config)
        store = "boxes" if is_boxed else "pieces"
        is_batched = problem.batch > 1
        is_plain = is_plain and is_boxed
        return Family("tma", problem.dtype, problem.precision, *majors, store, problem.out_dtype, is_batched, is_plain)
    majors = ("any", "any") if "any" in majors else majors
    store = "pieces" if is_read_in_pieces(problem) else "elements"
    return Family("pointer", problem.dtype, problem.precision, *majors, store)


def _is_default_out(problem: Problem) -> bool:
    return problem.out_dtype == OUT_DTYPES[problem.dtype][0]


def _is_main(problem: Problem) -> bool:
    """Whether every configuration is built for products like this; others make do with the `is_wide` ones."""
    return problem.a_major == "k" and problem.batch == 1 and _is_default_out(problem)


def _is_offered(candidate: Candidate, store: str, *, is_main: bool, is_plain: bool) -> bool:
    """Whether the binary of `candidate` is built for a family."""
    if store != "boxes" and candidate.config.is_persistent:
        # Without boxes a tile this large spills.
        return False
    if candidate.is_wide:
        return True
    return is_main and ((store == "boxes" and is_plain) or (store == "pieces" and can_split(candidate.config)))


def _has_descriptors(problem: Problem, target: Target) -> bool:
    """Whether the descriptor kernel is built for products like this, where operands are `is_padded_in`."""
    if not target.has_tma or not problem.is_aligned_out or arithmetic_of(problem) == "ieee":
        return False
    majors = (problem.a_major, problem.b_major)
    if not _is_default_out(problem) and (problem.out_dtype != "float32" or problem.a_major != "k"):
        return False
    return "any" not in majors if arithmetic_of(problem) == "half" else majors == ("k", "k")


def members(target: Target) -> Iterator[tuple[Family, Config]]:
    """Every family and configuration (with one split) that `choose` and `family_of` can give on `target`."""
    for dtype in OUT_DTYPES:
        for precision in PRECISIONS if dtype == "float32" else ("ieee",):
            if is_supported(dtype, target):
                yield from _pointer_members(dtype, precision, target)
                yield from _tma_members(dtype, precision, target)


def is_supported(dtype: str, target: Target) -> bool:
    """Whether `target` can multiply `dtype` at all."""
    is_old = (target.backend == "cuda" and int(target.arch) < 89) or target.arch == "gfx90a"
    return not (dtype.startswith("float8") and is_old)


def _pointer_members(dtype: str, precision: str, target: Target) -> Iterator[tuple[Family, Config]]:
    layouts = [("pieces", a_major, b_major) for a_major in "km" for b_major in "nk"]
    layouts += [("elements", a_major, b_major) for _, a_major, b_major in layouts] + [("elements", "any", "any")]
    for store, a_major, b_major in layouts:
        family = Family("pointer", dtype, precision, a_major, b_major, store)
        for config in _pointer_configs(dtype, precision, target, is_aligned=store == "pieces"):
            yield family, config


def _pointer_configs(dtype: str, precision: str, target: Target, *, is_aligned: bool) -> Iterator[Config]:
    if target.backend == "interpreter":
        yield _INTERPRETED
        return
    is_scalar = _is_scalar(dtype, precision, target)
    for config in fma_configs() if is_scalar else matrix_configs(dtype, is_aligned=is_aligned):
        yield for_amd(config) if target.backend == "hip" else config
    if dtype == "float32" and precision == "ieee" and is_aligned:
        yield from (config for _, _, config in _rules(target).get("ieee", ()))


def _tma_members(dtype: str, precision: str, target: Target) -> Iterator[tuple[Family, Config]]:
    problems = (
        Problem(FEW_ROWS + 1, 1, 1, batch, dtype, out_dtype, a_major, b_major, precision)
        for out_dtype in dict.fromkeys((OUT_DTYPES[dtype][0], "float32"))
        for a_major in "km"
        for b_major in "nk"
        for batch in (1, 2)
    )
    if target.backend == "interpreter":
        yield from _interpreted_members(dtype, precision)
        return
    for problem in problems:
        if not _has_descriptors(problem, target):
            continue
        for store, is_plain in (("boxes", True), ("boxes", False), ("pieces", False)):
            shown = replace(problem, is_boxed_out=store == "boxes")
            offer = {"is_main": _is_main(problem), "is_plain": is_plain}
            candidates = _candidates(target).get(arithmetic_of(problem), ())
            configs = [each.config for each in candidates if _is_offered(each, store, **offer)]
            configs += [
                config
                for _, _, config in _rules(target).get(arithmetic_of(problem), ())
                if store != "boxes" and _is_main(problem)
            ]
            for config in configs:
                family = family_of(shown, config, is_plain=is_plain)
                if family.store == store and family.is_plain == is_plain:
                    yield family, config


def _interpreted_members(dtype: str, precision: str) -> Iterator[tuple[Family, Config]]:
    flags = (True, False)
    for out_dtype, batch, is_boxed, is_plain in itertools.product(OUT_DTYPES[dtype], (1, 2), flags, flags):
        for a_major, b_major in itertools.product("km", "nk"):
            problem = Problem(FEW_ROWS + 1, 1, 1, batch, dtype, out_dtype, a_major, b_major, precision)
            problem = replace(problem, is_boxed_out=is_boxed)
            yield family_of(problem, _INTERPRETED_TMA, is_plain=is_plain), _INTERPRETED_TMA


def _is_scalar(dtype: str, precision: str, target: Target) -> bool:
    return dtype == "float32" and resolve_precision(precision, target) == "ieee"


def can_split(config: Config) -> bool:
    """Whether several programs may share a tile of `config`."""
    # Adding up the parts takes as many registers again as the tile.
    is_large = config.block_m * config.block_n > MAX_SPLIT_ELEMENTS * 32 * config.num_warps
    return not (is_large or config.is_persistent)


def arithmetic_of(problem: Problem) -> str:
    """The key of the tables: what the matrix unit multiplies."""
    if problem.dtype == "float32":
        return problem.precision
    return {"int8": "int8", "float8_e4m3fn": "float8", "float8_e5m2": "float8"}.get(problem.dtype, "half")


def choose_measured(problem: Problem, target: Target, *, is_plain: bool) -> Config | None:
    """The best measured configuration of the descriptor kernel; None where it cannot run or none was measured."""
    arithmetic = arithmetic_of(problem)
    rules = _rules(target).get(arithmetic, ())
    has_few_rows = _is_main(problem) and bool(rules) and problem.m <= rules[-1][0]
    if arithmetic == "ieee":
        return _by_rule(problem, rules, target) if has_few_rows and is_read_in_pieces(problem) else None
    if not (problem.is_padded_in and _has_descriptors(problem, target)):
        return None
    if has_few_rows:
        return _by_rule(problem, rules, target)
    return _by_model(problem, _candidates(target).get(arithmetic, ()), target, is_plain=is_plain)


def _by_model(problem: Problem, candidates: tuple[Candidate, ...], target: Target, *, is_plain: bool) -> Config | None:
    is_main = _is_main(problem)
    choices = [
        (each, split)
        for each in candidates
        for split in SPLITS
        if _is_sensible(problem, each, split, target)
        and _is_offered(each, _store(problem, each, split), is_main=is_main, is_plain=is_plain)
    ]
    if not choices:
        return None
    best, split_k = min(choices, key=lambda choice: predicted_us(problem, choice[0], choice[1], target))
    return replace(best.config, split_k=split_k)


def _store(problem: Problem, candidate: Candidate, split_k: int) -> str:
    return family_of(problem, replace(candidate.config, split_k=split_k), is_plain=False).store


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
    if split_k == 1:
        return True
    config = candidate.config
    # Parts that wait for a second wave cost more than the idle multiprocessors that they would use.
    too_many = config.tiles(problem) * split_k > target.num_sms * candidate.programs_per_sm
    return can_split(config) and not too_many and cdiv(problem.k, config.block_k) >= 2 * split_k


def _by_rule(problem: Problem, rules: tuple[tuple[int, int, Config], ...], target: Target) -> Config:
    """The first rule for so few rows whose tiles are enough, split until they occupy the device."""
    fitting = [(least, config) for most_rows, least, config in rules if problem.m <= most_rows]
    closest = min(most_rows for most_rows, _, _ in rules if problem.m <= most_rows)
    fitting = [(least, config) for most_rows, least, config in rules if most_rows == closest]
    config = next(config for least, config in fitting if config.tiles(problem) >= least)
    steps = cdiv(problem.k, config.block_k)
    wanted = (target.num_sms * 7 // 8) / config.tiles(problem)
    possible = [split for split in SPLITS if split == 1 or steps >= 2 * split]
    split_k = next((split for split in possible if split >= wanted), possible[-1])
    return replace(config, split_k=split_k)


@functools.cache
def _candidates(target: Target) -> dict[str, tuple[Candidate, ...]]:
    entries = table_for(target).get("matmul", {}).get("tiles", {})
    return {key: tuple(_candidate(entry) for entry in entries[key] if "step_us" in entry) for key in entries}


def _candidate(entry: dict[str, Any]) -> Candidate:
    costs = (tuple(entry["tile_us"]), tuple(entry["step_us"]))
    return Candidate(config_of(entry), entry["programs_per_sm"], *costs, entry.get("is_wide", False))


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
