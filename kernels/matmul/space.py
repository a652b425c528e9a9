"""The configurations of products that are worth measuring on a device, whether the catalogue has them or not. Pure.

Limits here are what is known beforehand: what fits shared memory by count, and how many elements a thread can hold. The
compiled candidate decides the rest.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

from tilewire.kernels.matmul.configs import (
    BOX_KERNELS,
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    OUT_DTYPES,
    SHARES,
    Config,
    Problem,
    as_read,
    boxes_of,
    is_narrow,
    is_read_in_pieces,
    pitch_of,
    place_of,
    takes_limbs,
)
from tilewire.kernels.matmul.facts import facts_of
from tilewire.kernels.matmul.members import (
    MODEL,
    SCALAR,
    SPLITS,
    arithmetic_of,
    binary_name,
    can_copy,
    has_descriptors,
    has_fma,
    has_wgmma,
    is_main,
    is_scalar,
    is_sensible,
    is_supported,
    specialization_of,
    stores_boxes,
    whole_of,
)
from tilewire.kernels.matmul.select import amounts_of
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.matmul.variants import build, warps_along_m
from tilewire.kernels.op import Tuning
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target

# The kernel for Hopper: rows of a tile, 64 for each consumer, and its columns; swapped, the other way round.
_SPLIT_ROWS = (64, 128, 192)
_COLUMNS = range(16, 257, 8)
# Rows and columns of a tile, for products of many rows.
_TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64), (64, 32), (128, 32))
# Rows of a tile for products of few.
_FEW = (16, 32, 64)
_MAX_STAGES, _MAX_FEW_STAGES, _MAX_WGMMA_STAGES = 6, 8, 16
# Tiles that a program has at most where programs of a cluster that share an operand are tried.
_MAX_TURNS = 2
# float32 sums of a thread: 128 leave room for addresses, below 16 a thread has too little to do.
_MIN_SUMS, _MAX_SUMS = 16, 128
# Barriers and alignment, bytes.
_RESERVED = 1024


def space(shape: MatmulShape, target: Target) -> Iterator[Config]:
    """Returns the configurations worth measuring for a shape."""
    problem = shape.problem
    arithmetic = arithmetic_of(problem)
    found: list[Config] = []
    is_copied = can_copy(problem, "tma")
    read = as_read(problem, Config("tma", 16, 16, 16, is_copied=is_copied))
    if has_descriptors(read, target) and read.is_padded_in:
        if problem.m > _FEW[1] or problem.batch > 1:
            found += _tall(arithmetic, problem.dtype, target)
        found += [
            config
            for config in _few(problem.dtype, target)
            if config.block_m // 2 < max(problem.m, 16) <= config.block_m
        ]
    # Aligned rows that are no whole boxes are stored as those that begin anywhere, which have a section of their own.
    if has_wgmma(read, target) and (problem.is_boxed_out or not problem.is_aligned_out):
        found += [config for config in _wgmma(arithmetic, problem.dtype, target) if _is_near(config, problem)]
    # A finer arithmetic's kernels are tuned by themselves.
    has_limbs = takes_limbs(problem, "tma")
    if not has_limbs and has_fma(
        as_read(problem, Config("fma", 16, 16, 16, is_copied=can_copy(problem, "fma"))), target
    ):
        found += _fma(problem, target)
    if (is_copied and not has_limbs) or not found:
        found += _pointer(problem, target)
    if problem.m <= 4 and is_read_in_pieces(problem) and problem.a_major == "k":
        found += _vector(problem)
    choices = itertools.product(dict.fromkeys(found), SPLITS, (False, True), ("", *SHARES))
    for config, split_k, is_copied, shares in choices:
        whole = replace(config, split_k=split_k, is_copied=is_copied, shares=shares)
        if has_limbs and not is_copied:
            continue
        if shares and not (config.kernel == "wgmma" and _is_short(problem, whole, target)):
            continue
        is_wasteful = config.block_m > 64 and config.block_m >= 2 * problem.m
        is_unstored = config.kernel == "tma" and config.is_persistent and not stores_boxes(problem, whole)
        is_unread = config.kernel in BOX_KERNELS and not has_descriptors(as_read(problem, whole), target)
        if is_sensible(problem, whole, target) and not (is_wasteful or is_unstored or is_unread):
            yield whole


def binaries(shape: MatmulShape, config: Config, target: Target) -> tuple[Variant, ...]:
    """Returns the binaries that a configuration launches for a shape."""
    specialization = specialization_of(shape.problem, config, is_plain=shape.is_plain)
    return (build(specialization, whole_of(config), target),)


@functools.cache
def _tall(arithmetic: str, dtype: str, target: Target) -> tuple[Config, ...]:
    """The descriptor kernel for many rows: 128 or 256 bytes of K a step, one, two or three programs on a multiprocessor."""
    found = []
    item_bytes, out_bytes = ITEM_BYTES[dtype], ITEM_BYTES[OUT_DTYPES[dtype][0]]
    for (block_m, block_n), k_bytes, num_warps in itertools.product(_TILES, (128, 256), (4, 8)):
        sums = block_m * block_n // (32 * num_warps)
        # Sums of each step come on top.
        is_coarse = arithmetic == "tf32x3" and sums > 64
        is_spread = num_warps == 8 and block_m * block_n < 128 * 128
        if not _MIN_SUMS <= sums <= _MAX_SUMS or is_coarse or is_spread:
            continue
        is_large = block_m * block_n >= 128 * 256
        halves = 2 if block_m * block_n >= 128 * 128 else 1
        store_bytes = block_m * block_n * out_bytes // halves
        beside = (1,) if is_large else (1, 2, 3)
        for num_stages, programs in _stages((block_m + block_n) * k_bytes, store_bytes, beside, _MAX_STAGES, target):
            blocks = (block_m, block_n, k_bytes // item_bytes)
            config = Config("tma", *blocks, num_warps=num_warps, num_stages=num_stages, halves=halves)
            if not is_large:
                found.append(config)
            if programs == 1:
                found.append(replace(config, is_persistent=True))
    return tuple(found)


@functools.cache
def _few(dtype: str, target: Target) -> tuple[Config, ...]:
    """The descriptor kernel for few rows; swapped, the matrix unit's 64 rows are columns of the weight."""
    found = []
    for block_m, block_n, k_bytes, is_swapped in itertools.product(_FEW, (32, 64, 128), (256, 512), (False, True)):
        if is_swapped and (block_n < 64 or block_m > 32):
            continue
        stage_bytes = (block_m + block_n) * k_bytes
        for num_stages, _ in _stages(stage_bytes, 0, (1, 2), _MAX_FEW_STAGES, target):
            config = Config("tma", block_m, block_n, k_bytes // ITEM_BYTES[dtype], 1, num_stages=num_stages)
            found.append(replace(config, is_swapped=is_swapped))
    return tuple(found)


@functools.cache
def _wgmma(arithmetic: str, dtype: str, target: Target) -> tuple[Config, ...]:
    """The kernel for Hopper, with as many stages as fit."""
    found = []
    item_bytes, out_bytes = ITEM_BYTES[dtype], ITEM_BYTES[OUT_DTYPES[dtype][0]]
    for rows, columns, is_swapped, k_bytes in itertools.product(_SPLIT_ROWS, _COLUMNS, (False, True), (128, 256)):
        blocks = (columns, rows) if is_swapped else (rows, columns)
        config = Config("wgmma", *blocks, k_bytes // item_bytes, is_persistent=True, is_swapped=is_swapped)
        main, tail = map(place_of, boxes_of(columns))
        # A square tile is the same either way. Narrow tiles are for few rows or columns, and so are long steps.
        is_double = is_swapped and rows == columns
        is_slim = not is_swapped and columns < (32 if rows <= 128 else 64)
        is_coarse = k_bytes > 128 and columns >= 64
        # Sums of 256 columns leave no registers for those of a step, nor for a third consumer's.
        is_full = main + tail == 256 and (rows == 192 or arithmetic == "float8")
        # Rows can be left out of a box, columns cannot.
        is_unstored = not is_swapped and (is_narrow(config) or tail == 8)
        if is_double or is_slim or is_coarse or is_full or is_unstored:
            continue
        # What stores in halves needs less shared memory, so more steps fit. All rows of a box are stored at once.
        is_halved = main == 2 * tail if is_narrow(config) else rows * columns > 128 * 128
        halves = 2 if is_halved else 1
        stored = main // halves + (tail if tail != main // halves else 0)
        pitch = pitch_of(config, item_bytes)
        kept = rows * stored * out_bytes + (main - pitch) * k_bytes
        for num_stages, _ in _stages((rows + pitch + tail) * k_bytes, kept, (1,), _MAX_WGMMA_STAGES, target)[:1]:
            num_warps = CONSUMER_WARPS * (rows // CONSUMER_ROWS)
            found.append(replace(config, num_warps=num_warps, num_stages=num_stages, halves=halves))
    return tuple(found)


def _is_near(config: Config, problem: Problem) -> bool:
    """Whether the rows of a tile of the kernel for Hopper suit few rows, where there are few."""
    if problem.m > CONSUMER_ROWS:
        return config.block_m >= CONSUMER_ROWS
    return config.block_m // 2 < max(problem.m, 16) <= config.block_m


def _is_short(problem: Problem, config: Config, target: Target) -> bool:
    """Whether programs have a few tiles each at most: then clusters of them may gain by what they share."""
    return config.tiles(problem) <= _MAX_TURNS * target.num_sms


def _stages(
    stage_bytes: int, store_bytes: int, beside: tuple[int, ...], largest: int, target: Target
) -> list[tuple[int, int]]:
    """(stages, programs on a multiprocessor) that use the shared memory up."""
    found: dict[int, int] = {}
    for programs in beside:
        count = min(largest, (target.shared_bytes // programs - _RESERVED - store_bytes) // stage_bytes)
        # The deepest pipeline is not always the fastest.
        for stages in dict.fromkeys((count, min(count, 4))):
            if stages >= (3 if programs == 1 else 2):
                found.setdefault(stages, programs)
    return list(found.items())


def _pointer(problem: Problem, target: Target) -> Iterator[Config]:
    """The pointer kernel: for scalar units, old or AMD devices, and operands that are not aligned."""
    is_fma = is_scalar(problem.dtype, problem.precision, target)
    item_bytes = ITEM_BYTES[problem.dtype]
    row = 32 if is_fma else 128 // item_bytes
    heights: tuple[int, ...] = (16, 32) if problem.m <= 32 else (32, 64, 128)
    lengths = (row, 2 * row, 4 * row) if problem.m <= 32 else (row // 2, row)
    if not is_read_in_pieces(problem):
        lengths = (row // 2, row)
    # Scalar units need 64 sums a thread, of which small tiles then have one or two warps.
    warps, fewest = ((1, 2, 4, 8), 16) if is_fma and problem.m > 32 else ((4, 8), 4)
    for block_m, block_n, block_k, num_warps in itertools.product(heights, (32, 64, 128), lengths, warps):
        sums = block_m * block_n // (target.warp_size * num_warps)
        if not fewest <= sums <= 64:
            continue
        group_m = 1 if problem.m <= 32 else 8
        if target.backend == "hip":
            waves = 2 if block_m * block_n >= 128 * 128 else 0
            yield Config("pointer", block_m, block_n, block_k, group_m, 1, num_warps, 2, waves_per_eu=waves)
        else:
            most = (target.shared_bytes // 2 - _RESERVED) // ((block_m + block_n) * block_k * item_bytes)
            for count in {min(4, most), 2 if is_fma else min(4, most)}:
                if most >= count >= 2:
                    yield Config("pointer", block_m, block_n, block_k, group_m, 1, num_warps, count)


def _fma(problem: Problem, target: Target) -> Iterator[Config]:
    """The kernel for scalar units: threads with 16 to 64 sums, steps of 64 to 256 bytes."""
    least = 16 if problem.m <= 256 else 32 if problem.m <= 512 else 64
    heights = [height for height in (16, 32, 64, 128) if least <= height < 2 * max(problem.m, 16)]
    for block_m, block_n, block_k, num_warps in itertools.product(
        heights, (32, 64, 128, 256), (16, 32, 64), (1, 2, 4, 8)
    ):
        config = Config("fma", block_m, block_n, block_k, 8 if problem.m > 128 else 1, num_warps=num_warps)
        is_small = block_m <= 32
        sums = block_m * block_n // (32 * num_warps)
        if not (16 if is_small else 32) <= sums <= 64 or not warps_along_m(config) or (block_k == 64 and not is_small):
            continue
        stages = {2 if block_k > 16 else 3}
        if is_small:
            step_bytes = (block_m + block_n) * block_k * ITEM_BYTES["float32"]
            stages.add(min(4, (target.shared_bytes - _RESERVED) // step_bytes))
        for num_stages in stages:
            yield replace(config, num_stages=num_stages)


def _vector(problem: Problem) -> Iterator[Config]:
    """The kernel without the matrix unit, for up to four rows: some 8 to 32 KiB of the weight in a block."""
    block_m = 1 if problem.m == 1 else 2 if problem.m == 2 else 4
    item_bytes = ITEM_BYTES[problem.dtype]
    for num_warps, depth, num_stages in itertools.product((2, 4), (2, 4), (2, 3, 4)):
        pieces = 16 // item_bytes
        elements = 32 * num_warps * pieces * depth
        if problem.b_major == "k":
            shapes = [
                (depth, 32 * num_warps * pieces),
                (2 * depth, 16 * num_warps * pieces),
                (4 * depth, 8 * num_warps * pieces),
            ]
        else:
            shapes = [(length, elements // length) for length in (32 * pieces, 16 * pieces, 8 * pieces)]
        for block_n, block_k in shapes:
            if block_m * elements <= 16384:
                yield Config("vector", block_m, block_n, block_k, 1, num_warps=num_warps, num_stages=num_stages)


def key_of(shape: MatmulShape) -> str:
    """Returns the table's section: the arithmetic, and whether operands are read element by element."""
    problem = shape.problem
    has_boxes = problem.is_padded_in or can_copy(problem, "tma") or can_copy(problem, "fma")
    is_wide = is_read_in_pieces(problem) or (has_boxes and problem.is_aligned_out)
    return arithmetic_of(problem) if is_wide else arithmetic_of(problem).removesuffix(" fast") + SCALAR


def _is_common(shape: MatmulShape, target: Target) -> bool:
    is_boxed = stores_boxes(shape.problem, Config("tma", 16, 16, 16))
    if has_fma(shape.problem, target):
        return is_main(shape.problem)
    # The kernel for Hopper has both binaries for all of its tiles, the descriptor kernel for those of all layouts.
    has_both = shape.is_plain or not is_boxed or has_wgmma(shape.problem, target)
    return (is_main(shape.problem) and has_both) or not has_descriptors(shape.problem, target)


# Most entries of a section, those of them for all layouts, and the least gain (of the mean logarithm of the time) of one more.
_SIZES = {
    "half": (33, 8, 0.0004),
    "float8": (20, 4, 0.0008),
    "float8 fast": (20, 4, 0.0008),
    "half scalar": (9, 6, 0.0004),
    "int8 scalar": (0, 5, 0.004),
    "float8 scalar": (7, 3, 0.0008),
    "tf32 scalar": (0, 5, 0.004),
    "ieee": (13, 4, 0.001),
    "tf32x3": (6, 4, 0.002),
}


TUNING = Tuning(
    space=space,
    model=MODEL,
    amounts=lambda shape, *launch: amounts_of(shape.problem, *launch, is_plain=shape.is_plain),
    facts=lambda shape, *launch: facts_of(shape.problem, *launch, is_plain=shape.is_plain),
    key=key_of,
    entry_of=whole_of,
    is_common=_is_common,
    sizes=lambda key: _SIZES.get(key, (0, 3, 0.003) if key.endswith(SCALAR) else (11, 5, 0.0015)),
    config=Config,
    is_supported=lambda shape, target: is_supported(shape.dtype, target),
    binary=lambda shape, config: binary_name(specialization_of(shape.problem, config, is_plain=shape.is_plain)),
)
