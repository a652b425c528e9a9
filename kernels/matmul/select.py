"""Choosing a product's configuration: the member of the catalogue with the least predicted time. Pure: no torch, no Triton.

Every tile that has a binary for the product is a candidate, at every sensible split of K. `amounts_of` says how much of each
term of the model (`members.MODEL`) a candidate has; the device's table says what the terms cost, and how the times of those
that are near the fastest are corrected by `facts_of` their launches. A choice that was learned while serving wins over all
predictions, a hand-written override of the table over both. `explain` prints why.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from tilewire.kernels.matmul.configs import (
    LIMBS_OF_K,
    VENDOR,
    Config,
    Problem,
    as_read,
    cdiv,
    copied_operands,
    has_limbs,
    is_read_in_pieces,
    takes_limbs,
)
from tilewire.kernels.matmul.facts import counts_of, facts_of
from tilewire.kernels.matmul.members import (
    FEW_ROWS,
    INTERPRETED,
    INTERPRETED_TMA,
    INTERPRETED_VECTORS,
    MODEL,
    SCALAR,
    SPLITS,
    arithmetic_of,
    binary_name,
    built_for,
    can_copy,
    can_split,
    has_vectors,
    is_possible,
    is_sensible,
    overrides_of,
    specialization_of,
    stores_boxes,
    tiles_for,
    whole_of,
)
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.layouts import COPY_BLOCK, LINE_BYTES, TURNED_BLOCK
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.correction import NEAR, factor
from tilewire.kernels.selection.cost_model import Amounts, Tile
from tilewire.kernels.selection.learned import Product, learned_for
from tilewire.kernels.selection.tables import table_name

# Past the fastest split of a tile, splits whose time is this many times it end the search.
_PAST_BEST = 1.2
# Bytes of memory that are loaded together.
_RUN_BYTES = 128
# Bytes of an operand that stay in L2 while others stream by.
_L2_BYTES = 24e6
# Threads that load at a time.
_WARP = 32
# Sums of the unit tile of the term `store`.
_UNIT_TILE = 128 * 128


def select(problem: Problem, target: Target, *, is_plain: bool = True) -> Config:
    """The configuration for `problem` on `target`: with its specialization, a member of `members(target)`.

    Args:
        problem: The product.
        target: The device.
        is_plain: Whether nothing follows the product.

    Raises:
        ValueError: The device does not multiply the dtype.
    """
    override = _override(problem, target, is_plain=is_plain)
    if override is not None:
        return override
    learned = learned_for(target)
    if learned is not None and (config := learned.find(Product(problem, is_plain))) is not None:
        return cast(Config, config)
    if target.backend == "interpreter":
        return _select_interpreted(problem)
    found = min(_predictions(problem, target, is_plain=is_plain), key=_us_of, default=None)
    if found is None:
        raise ValueError(f"a: {problem.dtype} is not multiplied by {target.name}")
    return found[1]


def ranked(problem: Problem, target: Target, *, is_plain: bool = True) -> list[tuple[float, Config]]:
    """Every member of the catalogue that computes `problem`, with its predicted microseconds, fastest first."""
    found = sorted(_predictions(problem, target, is_plain=is_plain), key=_us_of)
    return [(us, config) for us, config, _ in found]


def among_rows(problem: Problem) -> Problem:
    """Returns `problem` as it is with any number of rows: a lone row of `a` or of the output is aligned at any length."""
    unit, out_unit = 16 // ITEM_BYTES[problem.dtype], 16 // ITEM_BYTES[problem.out_dtype]
    return replace(
        problem,
        is_padded_a=problem.is_padded_a and problem.k % unit == 0,
        is_aligned_out=problem.is_aligned_out and problem.n % out_unit == 0,
    )


def select_invariant(problem: Problem, target: Target) -> Config:
    """A configuration that depends neither on the rows nor on the number of products, and does not split K.

    A row's sums then are the same, bit for bit, whatever it is computed with. Also a member of `members(target)`.

    Args:
        problem: The product, as `among_rows` returns it.
        target: The device.

    Raises:
        ValueError: The device does not multiply the dtype.
    """
    shown = replace(problem, m=4 * FEW_ROWS, batch=1)
    if target.backend == "interpreter":
        return replace(select(shown, target), split_k=1)
    # The store does depend on the rows, and a batch on their number: only tiles that are built for each.
    others = [replace(shown, m=rows, batch=batch, is_boxed_out=False) for rows in (1, 4 * FEW_ROWS) for batch in (1, 2)]
    able = [
        found
        for found in _predictions(shown, target, is_plain=False)
        if found[1].split_k == 1 and all(is_possible(other, found[1], target, is_plain=False) for other in others)
    ]
    if not able:
        raise ValueError(f"a: {problem.dtype} is not multiplied by {target.name}")
    return min(able, key=_us_of)[1]


def explain(problem: Problem, target: Target, *, is_plain: bool = True) -> str:
    """One line: what `select` gives `problem`, the terms of its predicted time, and what came next."""
    chosen = select(problem, target, is_plain=is_plain)
    head = f"{problem.dtype} {problem.m}x{problem.n}x{problem.k} by table {table_name(target)}: {described(chosen)}"
    found = sorted(_predictions(problem, target, is_plain=is_plain), key=_us_of)
    by_config = {config: (us, tile) for us, config, tile in found}
    if _override(problem, target, is_plain=is_plain) is not None:
        return f"{head}, an override of the table; predicted best: {described(found[0][1])}"
    us, tile = by_config[chosen]
    amounts = amounts_of(problem, chosen, tile.occupancy, target, is_plain=is_plain)
    terms = MODEL.explained(tile.costs, amounts)
    if tile.correction:
        terms += f", times {us / MODEL.us(tile.costs, amounts):.2f}"
    other = next((each for each in found if whole_of(each[1]) != whole_of(chosen)), None)
    after = f"; next {described(other[1])} {other[0]:.1f} µs" if other else ""
    return (
        f"{head}, {chosen.tiles(problem) * chosen.split_k} programs on {target.num_sms}, {us:.1f} µs = {terms}{after}"
    )


def described(config: Config) -> str:
    """A configuration in a few words."""
    if config == VENDOR:
        return "the vendor library"
    extra = [name for name in ("is_persistent", "is_swapped", "is_copied") if getattr(config, name)]
    split = [f"split {config.split_k}"] if config.split_k > 1 else []
    split += [f"{config.sharers} share {config.shares[0]}"] if config.shares else []
    words = [name.removeprefix("is_") for name in extra] + split
    blocks = f"{config.block_m}x{config.block_n}x{config.block_k}"
    return " ".join([config.kernel, blocks, f"{config.num_warps} warps", f"{config.num_stages} stages", *words])


def amounts_of(problem: Problem, config: Config, occupancy: int, target: Target, *, is_plain: bool) -> Amounts:
    """Returns the amount of each of `MODEL`'s terms in a launch."""
    if config.kernel == "element":
        return _element_amounts(problem, config, occupancy, target, is_plain=is_plain)
    item_bytes, out_bytes = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.out_dtype]
    # Read once, and written once for each limb that is multiplied.
    written = LIMBS_OF_K if has_limbs(problem, config) else 1
    copied_bytes = (1 + written) * problem.batch * _copied_bytes(problem, config)
    arithmetic = "tf32" if has_limbs(problem, config) else arithmetic_of(as_read(problem, config))
    problem = as_read(problem, config)
    rows, columns, programs, steps, turns, waves = counts_of(problem, config, occupancy, target)
    splits = config.split_k
    tile = config.block_m * config.block_n
    sm_rate = target.sm_flops_per_us(arithmetic)
    matrix_us = 0.0 if config.kernel == "vector" else turns * steps * 2 * tile * config.block_k / sm_rate
    loaded: float = turns * steps * config.block_k * item_bytes
    # Rows and columns past the end are not loaded. Short runs of memory are loaded with what is around them.
    run_bytes = (config.block_k if problem.b_major == "k" else config.block_n) * item_bytes
    around = max(1.0, _RUN_BYTES / run_bytes) if config.kernel == "vector" else 1.0
    parts_a, parts_b = config.sharers_of("a"), config.sharers_of("b")
    loaded *= min(config.block_m, problem.m) / parts_a + around * min(config.block_n, problem.n) / parts_b
    a_bytes, b_bytes = problem.m * problem.k * item_bytes, problem.k * problem.n * item_bytes
    # Each group of rows of tiles reads `b` anew where it does not stay in L2.
    again = cdiv(rows, config.group_m) if b_bytes > _L2_BYTES else 1
    moved = problem.batch * (a_bytes + b_bytes * again + problem.m * problem.n * out_bytes)
    idle_rows = 1 - problem.m / (rows * config.block_m)
    stored = turns * tile * (1 - idle_rows) * (problem.n / (columns * config.block_n)) / _UNIT_TILE
    strided: float = (problem.a_major != "k") + (problem.b_major != "n")
    if config.kernel == "fma":
        transposed = config.block_m * (problem.a_major == "k") + config.block_n * (problem.b_major == "k")
        strided = transposed / (config.block_m + config.block_n)
    is_in_pieces = problem.is_aligned_out if config.kernel == "tma" else is_read_in_pieces(problem)
    has_rest = is_in_pieces and config.kernel in ("tma", "pointer") and problem.n * out_bytes % 16 != 0
    is_split = splits > 1
    is_cluster = is_split and config.kernel == "wgmma"
    # A pair of multiprocessors has one way to L2. Programs get a pair each while there are no more than pairs.
    is_last_paired = 2 * (programs - (turns - 1) * target.num_sms) > target.num_sms
    paired = (turns - 1 + is_last_paired) / turns
    loaded_us = loaded / target.sm_l2_bytes_per_us
    # Programs of one column of tiles load the same box of `b` at a time, those of one row the same of `a`.
    loaders_a, loaders_b = min(columns, target.num_sms) / parts_a, min(rows, target.num_sms) / parts_b
    contended = loaders_b * config.block_n + loaders_a * config.block_m
    contended_us = turns * steps * config.block_k * item_bytes * contended / target.sm_l2_bytes_per_us
    line = LINE_BYTES // item_bytes
    is_ragged = (problem.b_major == "n" and problem.n % min(line, config.block_n) > 0) or (
        problem.a_major == "m" and problem.m % min(line, config.block_m) > 0
    )
    return (
        2.0 if config.is_copied else 1.0,
        copied_bytes / target.bytes_per_us,
        1.0 if config.is_persistent and not is_cluster else float(waves),
        stored * (1.0 if stores_boxes(problem, config) or config.kernel != "tma" else 1.5),
        0.0 if is_plain else stored,
        float(has_rest),
        float(is_split),
        2 * 4 * tile * programs / target.bytes_per_us if is_split and not is_cluster else 0.0,
        4e-6 * tile * splits if is_split else 0.0,
        matrix_us,
        strided * matrix_us,
        idle_rows * matrix_us,
        float(waves * steps),
        loaded_us,
        paired * loaded_us,
        contended_us,
        loaded_us if is_ragged and config.kernel == "tma" else 0.0,
        moved / target.bytes_per_us,
    )


def _element_amounts(problem: Problem, config: Config, occupancy: int, target: Target, *, is_plain: bool) -> Amounts:
    """The amounts of a launch of `element`: what its warps load are lines of memory, whatever they take of them."""
    _, _, _, steps, turns, waves = counts_of(problem, config, occupancy, target)
    # Squares that a warp has: neighbours beside each other, then below, then of the next product.
    squares = _WARP // config.lanes
    down, across = cdiv(problem.m, config.block_m), cdiv(problem.n, config.block_m)
    rows = max(1.0, squares / across)
    columns = min(float(squares), min(across, squares) * max(1.0, squares / (down * across)))
    lines = _lines(rows, config, problem.a_major == "m", problem)
    lines += _lines(columns, config, problem.b_major == "n", problem)
    threads = turns * config.block_n * config.lanes
    stored = threads * config.block_m**2 / _UNIT_TILE
    # Elements of K of a thread.
    own_k = steps * config.block_k // config.lanes
    found = dict.fromkeys((term.name for term in MODEL.terms), 0.0)
    found |= {
        "launch": 1.0,
        "fill": float(waves),
        "store": stored,
        "epilogue": 0.0 if is_plain else stored,
        "matrix": 2.0 * threads * own_k * config.block_m**2 / target.sm_flops_per_us("ieee"),
        "step": float(waves * steps),
        "load": threads / _WARP * own_k * lines * LINE_BYTES / target.sm_l2_bytes_per_us,
        "memory": problem.min_bytes / target.bytes_per_us,
    }
    return tuple(found.values())


def _lines(count: float, config: Config, is_across: bool, problem: Problem) -> float:
    """Lines of memory that a warp reads for `count` neighbouring rows of each side, as many elements of K as it has lanes.

    Rows lie along K or, `is_across`, across it.
    """
    item_bytes = ITEM_BYTES[problem.dtype]
    if is_across:
        return config.block_m * config.lanes * max(1.0, count * item_bytes / LINE_BYTES)
    along_k = max(1.0, config.lanes * item_bytes / LINE_BYTES)
    return config.block_m * max(1.0, count * min(1.0, problem.k * item_bytes / LINE_BYTES) * along_k)


def _copied_bytes(problem: Problem, config: Config) -> int:
    """Bytes of the blocks that are read, and written, to copy operands of one batch entry before the product."""
    if not config.is_copied:
        return 0
    read = as_read(problem, config)
    is_a, is_b = copied_operands(problem, config.kernel)
    found = 0
    if is_a:
        sizes = (problem.m, problem.k) if read.a_major == "k" else (problem.k, problem.m)
        found += _block_bytes(*sizes, problem, is_turned=problem.a_major not in ("any", read.a_major))
    if is_b:
        sizes = (problem.k, problem.n) if read.b_major == "n" else (problem.n, problem.k)
        found += _block_bytes(*sizes, problem, is_turned=problem.b_major not in ("any", read.b_major))
    return found


def _block_bytes(rows: int, columns: int, problem: Problem, *, is_turned: bool) -> int:
    """Bytes of the blocks that hold so many rows: those that are filled in part take as long as full ones."""
    block_rows, block_bytes = TURNED_BLOCK if is_turned else COPY_BLOCK
    return cdiv(rows, block_rows) * cdiv(columns * ITEM_BYTES[problem.dtype], block_bytes) * block_rows * block_bytes


def _select_interpreted(problem: Problem) -> Config:
    if has_vectors(problem):
        return next(config for config in INTERPRETED_VECTORS if problem.m <= config.block_m)
    is_boxed = stores_boxes(problem, INTERPRETED_TMA)
    split_k = 2 if problem.k > 64 and not is_boxed else 1
    is_copied = takes_limbs(problem, "tma") and can_copy(problem, "tma")
    has_boxes = (problem.is_padded_in or is_copied) and problem.is_aligned_out
    return replace(INTERPRETED_TMA if has_boxes else INTERPRETED, split_k=split_k, is_copied=is_copied)


def _override(problem: Problem, target: Target, *, is_plain: bool) -> Config | None:
    """The table's first override that covers `problem` and can compute it."""
    for override in overrides_of(target):
        config: Config = override.tile.config
        is_meant = override.key.removesuffix(SCALAR) == arithmetic_of(problem) and override.covers(problem)
        if is_meant and is_possible(problem, config, target, is_plain=is_plain):
            return config
    return None


def _us_of(prediction: tuple[float, Config, Tile]) -> float:
    return prediction[0]


def _predictions(problem: Problem, target: Target, *, is_plain: bool) -> list[tuple[float, Config, Tile]]:
    """Every candidate with its predicted microseconds."""
    found = list(_uncorrected(problem, target, is_plain=is_plain))
    most_us = NEAR * min(map(_us_of, found), default=0.0)

    def corrected(us: float, config: Config, tile: Tile) -> float:
        if us > most_us or not tile.correction:
            return us
        return us * factor(tile.correction, facts_of(problem, config, tile.occupancy, target, is_plain=is_plain))

    return [(corrected(*each), *each[1:]) for each in found]


def _uncorrected(problem: Problem, target: Target, *, is_plain: bool) -> Iterator[tuple[float, Config, Tile]]:
    """Every candidate with the sum of its terms; splits of a tile only while more of them help."""
    for configs in _able(_representative(problem), is_plain, target):
        best_us = math.inf
        for config, tile in configs:
            if not is_sensible(problem, config, target):
                continue
            us = MODEL.us(tile.costs, amounts_of(problem, config, tile.occupancy, target, is_plain=is_plain))
            yield us, config, tile
            if us > _PAST_BEST * best_us:
                break
            best_us = min(best_us, us)


# Any configuration of each kernel: what specialization a product is of depends on no more.
_PROBES = {kernel: Config(kernel, 16, 16, 16) for kernel in ("pointer", "tma", "wgmma", "fma", "vector", "element")}


def _representative(problem: Problem) -> Problem:
    """The one product that stands for all that have the same binaries as `problem`."""
    # One that divides into 16 bytes where the size does, and one that does not.
    m, n, k = (16 if size % (16 // ITEM_BYTES[problem.dtype]) == 0 else 1 for size in (problem.m, problem.n, problem.k))
    return replace(problem, m=m + FEW_ROWS * (problem.m > FEW_ROWS), n=n, k=k, batch=min(problem.batch, 2))


@functools.lru_cache(maxsize=4096)
def _able(problem: Problem, is_plain: bool, target: Target) -> tuple[tuple[tuple[Config, Tile], ...], ...]:
    """For each tile with binaries for products like this, its configurations that have one, by rising split of K.

    Looked up, since working it out takes longer than choosing.
    """
    # By kernel, and whether operands are copied: the specialization at each split of K.
    specializations = {
        (kernel, is_copied): [
            specialization_of(problem, replace(probe, split_k=split, is_copied=is_copied), is_plain=is_plain)
            for split in SPLITS
        ]
        for (kernel, probe), is_copied in itertools.product(_PROBES.items(), (False, True))
        if not is_copied or can_copy(problem, kernel)
    }
    found = []
    for tile, is_copied in itertools.product(tiles_for(problem, target), (False, True)):
        config = tile.config
        if (config.kernel, is_copied) not in specializations:
            continue
        kinds = specializations[config.kernel, is_copied]
        if (tile.store == "scalar") != (kinds[0].store == "scalar"):
            continue
        configs = [
            (split, tile.in_binary(binary_name(kind)))
            for split, kind in zip(_split(config, is_copied=is_copied), kinds, strict=True)
            if config in built_for(kind, target) and (split.split_k == 1 or can_split(config))
        ]
        if configs:
            found.append(tuple(configs))
    return tuple(found)


@functools.cache
def _split(config: Config, *, is_copied: bool) -> tuple[Config, ...]:
    """A tile at every split of K."""
    return tuple(replace(config, split_k=split, is_copied=is_copied) for split in SPLITS)
