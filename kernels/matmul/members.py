"""The finite set of matmul's binaries: families, and which configurations each is built with. Pure: no torch, no Triton.

Choosing is `choice`'s; what it gives is checked against, and enumerated by, this.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from tilewire.kernels.matmul.configs import (
    OUT_DTYPES,
    PRECISIONS,
    Config,
    Family,
    Problem,
    cdiv,
    fma_configs,
    for_amd,
    is_read_in_pieces,
    matrix_configs,
    resolve_precision,
)
from tilewire.kernels.matmul.table import Candidate, are_for_all, candidates_of, rules_of
from tilewire.kernels.runtime.targets import Target

# Elements of a tile for each thread, above which a tile is not split.
MAX_SPLIT_ELEMENTS = 64
# Up to here a descriptor does not pay for storing.
FEW_ROWS = 64
# How many programs may share a tile.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
# More programs than this many times the multiprocessors gain nothing from another split of K.
MOST_WAVES = 4
# Small blocks reach every tail and loop of the kernels at sizes that an interpreter can do.
INTERPRETED = Config("pointer", 16, 16, 32, 2)
INTERPRETED_TMA = Config("tma", 16, 32, 32, 2, is_persistent=True, halves=2)


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


def is_main(problem: Problem) -> bool:
    """Whether every configuration is built for products like this; others make do with the `is_wide` ones."""
    return problem.a_major == "k" and problem.batch == 1 and _is_default_out(problem)


def is_offered(candidate: Candidate, store: str, *, for_main: bool, is_plain: bool) -> bool:
    """Whether the binary of `candidate` is built for a family."""
    if store != "boxes" and candidate.config.is_persistent:
        # Without boxes a tile this large spills.
        return False
    if candidate.is_wide:
        return True
    return for_main and ((store == "boxes" and is_plain) or (store == "pieces" and can_split(candidate.config)))


def has_descriptors(problem: Problem, target: Target) -> bool:
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
        yield INTERPRETED
        return
    is_fma = is_scalar(dtype, precision, target)
    arithmetic = arithmetic_of(Problem(1, 1, 1, 1, dtype, dtype, precision=precision))
    rules = rules_of(target).get(arithmetic, ()) if is_aligned else ()
    yield from (rule.config for rule in rules if rule.config.kernel == "pointer")
    if not are_for_all(rules):
        for config in fma_configs() if is_fma else matrix_configs(dtype, is_aligned=is_aligned):
            yield for_amd(config) if target.backend == "hip" else config


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
        if not has_descriptors(problem, target):
            continue
        for store, is_plain in (("boxes", True), ("boxes", False), ("pieces", False)):
            shown = replace(problem, is_boxed_out=store == "boxes")
            offer = {"for_main": is_main(problem), "is_plain": is_plain}
            candidates = candidates_of(target).get(arithmetic_of(problem), ())
            configs = [each.config for each in candidates if is_offered(each, store, **offer)]
            rules = rules_of(target).get(arithmetic_of(problem), ())
            if store != "boxes" and is_main(problem):
                configs += [rule.config for rule in rules if rule.config.kernel == "tma"]
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
            yield family_of(problem, INTERPRETED_TMA, is_plain=is_plain), INTERPRETED_TMA


def is_scalar(dtype: str, precision: str, target: Target) -> bool:
    """Whether products run without a matrix unit."""
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


def is_sensible(problem: Problem, config: Config, target: Target) -> bool:
    """Whether the kernel of `config` can read and write `problem`, and its split of K leaves work for each program."""
    if config.split_k > 1:
        steps, tiles = cdiv(problem.k, config.block_k), config.tiles(problem)
        is_too_fine = steps < 2 * config.split_k or tiles * config.split_k > MOST_WAVES * target.num_sms
        if is_too_fine or not can_split(config):
            return False
    return config.kernel != "tma" or (problem.is_padded_in and problem.is_aligned_out)


def is_possible(problem: Problem, config: Config, target: Target, *, is_plain: bool) -> bool:
    """Whether there is a binary of `config` for `problem`, and using it is sensible."""
    if not is_sensible(problem, config, target):
        return False
    family = family_of(problem, config, is_plain=is_plain)
    return replace(config, split_k=1) in built_for(family, target)


def built_for(family: Family, target: Target) -> Collection[Config]:
    """The configurations, with one split, that the catalogue has a binary of for `family`."""
    return by_family(target).get(family, ())


@functools.cache
def by_family(target: Target) -> dict[Family, dict[Config, None]]:
    """`members`, in order, with what is built for each family. Listing the catalogue fills it, so that no request does."""
    found: dict[Family, dict[Config, None]] = defaultdict(dict)
    for family, config in members(target):
        found[family][config] = None
    return dict(found)
