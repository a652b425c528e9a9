"""The finite set of matmul's binaries: tiles of a device's table, and what each is built for. Pure: no torch, no Triton.

`select` chooses among these; what it gives is checked against, and enumerated by, this.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilewire.kernels.matmul.configs import (
    BOX_KERNELS,
    LIMB_KERNELS,
    LIMBS_OF_K,
    OUT_DTYPES,
    Config,
    Problem,
    Specialization,
    as_read,
    boxes_of,
    cdiv,
    copied_operands,
    is_narrow,
    is_read_in_pieces,
    precisions_of,
    programs_on,
    resolve_precision,
    right_of,
    stages_beside,
    takes_limbs,
)
from tilewire.kernels.matmul.facts import Facts
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.correction import correction_of
from tilewire.kernels.selection.cost_model import Model, Term, Tile, tile_of
from tilewire.kernels.selection.tables import table_for

# Elements of a tile for each thread, above which a tile is not split.
MAX_SPLIT_ELEMENTS = 64
# Up to here a descriptor does not pay for storing.
FEW_ROWS = 64
# Most rows that the kernel without the matrix unit multiplies.
MAX_VECTOR_ROWS = 4
# Longest K that one thread adds up in order.
MAX_ELEMENT_K = 1024
# End of the name of a section for operands that are read element by element.
SCALAR = " scalar"
# How many programs may share a tile.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
# For the kernel for Hopper, where they are a cluster: how many.
CLUSTERS = (2, 3)
# Of all places for programs, those that clusters of more than two find at once. A cluster lies within a group of
# multiprocessors, and those that are over stay idle: 39 clusters of three and 30 of four had room on 132 multiprocessors. One
# more takes as long as all before.
_CLUSTERED = 0.88
# Most sums of a tile that programs of a cluster share, and fewest steps of operands that must fit beside those.
MAX_CLUSTER_SUMS, _MIN_STAGES = 128 * 64, 4
# Scratch memory is kept, so larger operands are read where they are.
MAX_COPIED_BYTES = 2 << 30
# More programs than this many times the multiprocessors gain nothing from another split of K.
MAX_WAVES = 4
# Small blocks reach every tail and loop of the kernels at sizes that an interpreter can do.
INTERPRETED = Config("pointer", 16, 16, 32, 2)
INTERPRETED_TMA = Config("tma", 16, 32, 32, 2, is_persistent=True, halves=2)
INTERPRETED_VECTORS = tuple(Config("vector", rows, 16, 32, 1, num_stages=2) for rows in (1, 2, 4))

# Terms of the time of a product; `select.amounts_of` has the amount of each.
MODEL = Model(
    Term("launch", "launches", 2.0),
    Term("copy", "µs at the memory's bandwidth for the blocks of operands copied first, read and written", 1.5),
    Term("fill", "waves of programs whose first loads nothing hides", 0.8),
    Term("store", "tiles of 128×128 that one multiprocessor stores", 1.1),
    Term("epilogue", "the same, where a bias or an activation follows", 0.3),
    Term(
        "rest", "1 where rows of the output end within 16 bytes, and are stored in pieces of 16 and then the rest", 0.8
    ),
    Term("split", "1 where programs share tiles", 1.1),
    Term("exchange", "µs at the memory's bandwidth for the parts of shared tiles", 0.55),
    Term("sum", "MB that the last program of a shared tile adds up", 8.5),
    Term("matrix", "µs at the full rate of one multiprocessor's matrix units", 0.65),
    Term(
        "strided",
        "the same, for each operand that is not contiguous along K (a) or N (b); `fma`: for the share of both that is",
        0.1,
    ),
    Term("idle", "µs of `matrix` for rows past those of the product, or that another tile has, too", 0.1),
    Term("step", "steps of K that follow one another", 0.05),
    Term("load", "µs at L2's bandwidth for what one multiprocessor loads", 0.25),
    Term("pair", "the same, while more than half of the multiprocessors work: two share a way to L2", 0.1),
    Term(
        "contention",
        "µs at L2's bandwidth of one multiprocessor for boxes, once for each program that loads them",
        0.005,
    ),
    Term("ragged", "µs of `load` where rows of memory end within boxes; 0 for `wgmma`, whose boxes reach on", 0.05),
    Term("memory", "µs at the memory's bandwidth, operands read once a group of tiles", 0.7),
)


def _element_tile(side: int, squares: int, block_k: int, lanes: int, *costs: float) -> Tile:
    """A tile of `element`, whose binary is the same for all layouts and outputs, with the costs of `_ELEMENT_TERMS`."""
    config = Config("element", side, squares, block_k, 1, num_stages=1, lanes=lanes)
    found = dict.fromkeys((term.name for term in MODEL.terms), 0.0) | dict(zip(_ELEMENT_TERMS, costs, strict=True))
    return Tile(config, MODEL.costs(found, {}), _ELEMENT_OCCUPANCY, "scalar", all_layouts=True)


# Costs of an H200, for all devices: but for the first and the last they are in units of a device's rates.
_ELEMENT_TERMS = ("launch", "store", "epilogue", "matrix", "load", "memory", "step")
_ELEMENT_OCCUPANCY = 8
ELEMENTS = (
    _element_tile(1, 128, 4, 1, 1.62, 20.6, 5.0, 1.29, 0.0863, 0.455, 0.230),
    _element_tile(2, 128, 4, 1, 1.69, 12.7, 5.0, 6.87, 0.114, 0.650, 0.207),
    _element_tile(1, 16, 32, 8, 1.65, 23.6, 5.0, 0.31, 0.0, 0.662, 0.291),
    _element_tile(2, 16, 32, 8, 1.76, 7.58, 5.0, 9.40, 0.0015, 0.939, 0.248),
    _element_tile(1, 4, 128, 32, 1.64, 21.8, 5.0, 3.17, 0.0048, 0.488, 0.314),
)


@dataclass(frozen=True)
class Override:
    """A choice made by hand, which wins over every prediction.

    Attributes:
        key: Section of the table.
        sizes: Ranges (first, last) of M, N and K.
        tile: Tile of products of such sizes; its `split_k` counts.
    """

    key: str
    sizes: tuple[tuple[int, int], ...]
    tile: Tile

    def covers(self, problem: Problem) -> bool:
        """Whether `problem` is of such sizes."""
        given = zip(self.sizes, (problem.m, problem.n, problem.k), strict=True)
        return all(first <= size <= last for (first, last), size in given)


@functools.cache
def tiles_of(target: Target) -> dict[str, tuple[Tile, ...]]:
    """By section, the tiles of the device's table, those of overrides at the end."""
    found = {}
    by_hand = overrides_of(target)
    for key, section in table_for(target).get("matmul", {}).items():
        defaults = section.get("costs", {})
        listed = [_tile(entry, key, defaults) for entry in section["tiles"]]
        listed += [
            replace(each.tile, config=replace(each.tile.config, split_k=1)) for each in by_hand if each.key == key
        ]
        correction = correction_of(section, Facts._fields)
        by_config = {tile.config: replace(tile, correction=correction) for tile in reversed(listed)}
        found[key] = tuple(by_config.values())[::-1]
    return found


def _tile(entry: dict[str, Any], key: str, defaults: dict[str, float]) -> Tile:
    """The tile that an entry of the table's section `key` describes."""
    store = "scalar" if key.endswith(SCALAR) else "vec16" if entry["kernel"] == "pointer" else ""
    return tile_of(Config, MODEL, entry, defaults, store)


@functools.cache
def overrides_of(target: Target) -> tuple[Override, ...]:
    """The hand-written section `overrides` of the device's table, first match first.

    An entry: `{"op": "matmul", "key": "half", "sizes": "1-64 x 4096 x *", "config": {…}}`.
    """
    entries = table_for(target).get("overrides", ())
    return tuple(
        Override(
            entry["key"], _ranges(entry["sizes"]), _tile(entry["config"] | {"all_layouts": True}, entry["key"], {})
        )
        for entry in entries
        if entry["op"] == "matmul"
    )


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    """`1-64 x 4096 x *` as three ranges."""
    found = []
    for part in text.split("x"):
        first, _, last = part.strip().partition("-")
        found.append((0, 1 << 62) if first == "*" else (int(first), int(last or first)))
    if len(found) != 3:
        raise ValueError(f"sizes: expected M x N x K, got {text!r}")
    return tuple(found)


def stores_boxes(problem: Problem, config: Config) -> bool:
    """Whether the descriptor kernel also stores through a descriptor. Few rows are as well stored without."""
    has_many_rows = problem.m > FEW_ROWS or problem.batch > 1
    return problem.is_boxed_out and _is_default_out(problem) and config.split_k == 1 and has_many_rows


def specialization_of(problem: Problem, config: Config, *, is_plain: bool) -> Specialization:
    """Returns all that the binary for `problem` depends on besides `config`.

    Args:
        problem: The product.
        config: Configuration.
        is_plain: Whether nothing follows it.
    """
    problem = as_read(problem, config)
    majors = (problem.a_major, problem.b_major)
    if config.kernel == "wgmma":
        splits = config.split_k
        store = "tma" if problem.is_boxed_out else "scalar"
        is_plain = is_plain and store == "tma" and splits == 1
        kind = ("wgmma", problem.dtype, problem.precision, *majors, store, problem.out_dtype)
        return Specialization(*kind, problem.batch > 1, splits, is_plain)
    if config.kernel == "tma":
        is_boxed = stores_boxes(problem, config)
        store = "tma" if is_boxed else "vec16" if problem.is_aligned_out else "scalar"
        is_plain = is_plain and is_boxed
        kind = ("tma", problem.dtype, problem.precision, *majors, store, problem.out_dtype)
        return Specialization(*kind, is_batched=True, is_plain=is_plain)
    if config.kernel == "vector":
        return Specialization("vector", problem.dtype, "ieee", "k", problem.b_major, "vec16")
    if config.kernel == "element":
        return Specialization("element", problem.dtype, "ieee", "any", "any", "scalar")
    if config.kernel == "fma":
        store = "vec16" if problem.is_aligned_out else "scalar"
        return Specialization("fma", problem.dtype, problem.precision, *majors, store)
    majors = ("any", "any") if "any" in majors else majors
    store = "vec16" if is_read_in_pieces(problem) else "scalar"
    return Specialization("pointer", problem.dtype, problem.precision, *majors, store)


def binary_name(specialization: Specialization) -> str:
    """Name of a tile's binary among those that may need other resources."""
    return f"{specialization.a_major}{specialization.b_major} {specialization.store}"


def _is_default_out(problem: Problem) -> bool:
    return problem.out_dtype == OUT_DTYPES[problem.dtype][0]


def is_main(problem: Problem) -> bool:
    """Whether every tile is built for products like this; others, and batches in `wgmma`, have those for all layouts."""
    return problem.a_major == "k" and _is_default_out(problem)


def _is_offered(tile: Tile, store: str, a_major: str, *, for_main: bool, is_plain: bool) -> bool:
    """Whether the binary of a descriptor tile is built for a specialization."""
    if (store == "scalar") != (tile.store == "scalar"):
        return False
    if store == "scalar" and a_major != "k":
        # Such an `a` is copied first.
        return False
    if store != "tma" and tile.config.is_persistent:
        # Without boxes a tile this large spills.
        return False
    if store == "tma" and (tile.config.is_swapped or tile.config.block_m < FEW_ROWS):
        # Larger tiles are always better for many rows.
        return False
    if tile.all_layouts:
        return True
    return for_main and ((store == "tma" and is_plain) or (store in ("vec16", "scalar") and can_split(tile.config)))


def has_descriptors(problem: Problem, target: Target) -> bool:
    """Whether the descriptor kernel is built for products like this, where operands are `is_padded_in`."""
    if not target.has_tma or arithmetic_of(problem) == "ieee":
        return False
    majors = (problem.a_major, problem.b_major)
    if not _is_default_out(problem) and (problem.out_dtype != "float32" or problem.a_major != "k"):
        return False
    return "any" not in majors if arithmetic_of(problem) == "half" else majors == ("k", "k")


def has_wgmma(problem: Problem, target: Target) -> bool:
    """Whether the kernel for Hopper can multiply `problem`. Batches it stores through a descriptor only."""
    is_hopper = target.backend == "cuda" and target.arch == 90
    is_known = arithmetic_of(problem) in {"half", "float8", "float8 fast"} and _is_default_out(problem)
    is_described = problem.is_padded_in and (problem.is_boxed_out or problem.batch == 1)
    return is_hopper and is_known and is_described and has_descriptors(problem, target)


def fits_boxes(problem: Problem, config: Config) -> bool:
    """Whether boxes of the kernel for Hopper can have as many rows as a tile of `config` needs.

    Any number of rows can be left out of a box, of the right operand and of the output, but not columns of its rows.
    Programs of a cluster share no operand of a batch.
    """
    if config.shares and problem.batch > 1:
        return False
    return not is_narrow(config) or (config.is_swapped and problem.a_major == "k")


def has_fma(problem: Problem, target: Target) -> bool:
    """Whether the kernel for NVIDIA's scalar units can read `problem`."""
    is_meant = target.backend == "cuda" and arithmetic_of(problem) == "ieee"
    is_described = problem.is_padded_in or problem.is_aligned_in
    return is_meant and is_described and "any" not in (problem.a_major, problem.b_major)


def has_vectors(problem: Problem) -> bool:
    """Whether the kernel without the matrix unit can read `problem`."""
    return problem.m <= MAX_VECTOR_ROWS and problem.a_major == "k" and is_read_in_pieces(problem)


def members(target: Target) -> Iterator[tuple[Specialization, Config]]:
    """Every specialization and configuration (with one split) that `select` and `specialization_of` can give on `target`."""
    for dtype in OUT_DTYPES:
        if not is_supported(dtype, target):
            continue
        for precision in precisions_of(dtype):
            shown = Problem(1, 1, 1, 1, dtype, OUT_DTYPES[dtype][0], precision=precision)
            yield from _pointer_members(shown, target)
            yield from _fma_members(shown, target)
            yield from _interpreted_members(shown) if target.backend == "interpreter" else _tma_members(shown, target)
            yield from _wgmma_members(shown, target)
        yield from _vector_members(Problem(1, 1, 1, 1, dtype, OUT_DTYPES[dtype][0]), target)
        elements = Specialization("element", dtype, "ieee", "any", "any", "scalar")
        yield from ((elements, tile.config) for tile in ELEMENTS)


def is_supported(dtype: str, target: Target) -> bool:
    """Whether `target` can multiply `dtype` at all."""
    is_old = (target.backend == "cuda" and int(target.arch) < 89) or target.arch == "gfx90a"
    return not (dtype.startswith("float8") and is_old)


def tiles_for(problem: Problem, target: Target) -> tuple[Tile, ...]:
    """The tiles of `problem`'s arithmetic, or of what the device has instead; for `tf32x3` those of `ieee`, too."""
    arithmetic = arithmetic_of(problem)
    if problem.dtype == "float32":
        arithmetic = resolve_precision(arithmetic, target)
    finer = _tiles_of_arithmetic("ieee", target) if arithmetic == "tf32x3" else ()
    return (*_tiles_of_arithmetic(arithmetic, target), *finer, *ELEMENTS)


def _tiles_of_arithmetic(arithmetic: str, target: Target) -> Iterator[Tile]:
    # A table that was measured without fast sums has the same tiles for them.
    keys = (
        arithmetic if arithmetic in tiles_of(target) else arithmetic.removesuffix(" fast"),
        arithmetic.removesuffix(" fast") + SCALAR,
    )
    return (tile for key in keys for tile in tiles_of(target).get(key, ()))


def _pointer_members(shown: Problem, target: Target) -> Iterator[tuple[Specialization, Config]]:
    layouts = [("vec16", a_major, b_major) for a_major in "km" for b_major in "nk"]
    layouts += [("scalar", a_major, b_major) for _, a_major, b_major in layouts] + [("scalar", "any", "any")]
    tiles = tiles_for(shown, target)
    if takes_limbs(shown, "pointer"):
        # Other tiles of these multiply float32 as it is.
        layouts = [(store, "k", "k") for store in ("vec16", "scalar")]
        tiles = tuple(_tiles_of_arithmetic("tf32x3", target))
    for store, a_major, b_major in layouts:
        specialization = Specialization("pointer", shown.dtype, shown.precision, a_major, b_major, store)
        if target.backend == "interpreter":
            yield specialization, INTERPRETED
            continue
        for tile in tiles:
            if tile.config.kernel == "pointer" and tile.store in ("", store):
                yield specialization, tile.config


def _fma_members(shown: Problem, target: Target) -> Iterator[tuple[Specialization, Config]]:
    for a_major, b_major, is_aligned_out in itertools.product("km", "nk", (True, False)):
        problem = replace(shown, a_major=a_major, b_major=b_major, is_aligned_out=is_aligned_out)
        for tile in tiles_for(problem, target) if has_fma(problem, target) else ():
            is_offered = tile.all_layouts or is_main(problem)
            if tile.config.kernel == "fma" and is_offered and (tile.store == "scalar") != is_aligned_out:
                yield specialization_of(problem, tile.config, is_plain=True), tile.config


def _vector_members(shown: Problem, target: Target) -> Iterator[tuple[Specialization, Config]]:
    tiles = INTERPRETED_VECTORS
    if target.backend != "interpreter":
        tiles = tuple(tile.config for tile in tiles_for(shown, target) if tile.config.kernel == "vector")
    for b_major, config in itertools.product("nk", tiles):
        yield Specialization("vector", shown.dtype, "ieee", "k", b_major, "vec16"), config


def _tma_members(shown: Problem, target: Target) -> Iterator[tuple[Specialization, Config]]:
    out_dtypes = dict.fromkeys((OUT_DTYPES[shown.dtype][0], "float32"))
    for out_dtype, a_major, b_major in itertools.product(out_dtypes, "km", "nk"):
        problem = replace(shown, m=FEW_ROWS + 1, out_dtype=out_dtype, a_major=a_major, b_major=b_major)
        if not has_descriptors(problem, target):
            continue
        for store, is_plain in (("tma", True), ("tma", False), ("vec16", False), ("scalar", False)):
            boxed = replace(problem, is_boxed_out=store == "tma", is_aligned_out=store != "scalar")
            for tile in tiles_for(problem, target):
                if tile.config.kernel != "tma":
                    continue
                read_by = replace(tile.config, is_copied=takes_limbs(problem, "tma"))
                specialization = specialization_of(boxed, read_by, is_plain=is_plain)
                is_offered = _is_offered(tile, store, a_major, for_main=is_main(problem), is_plain=is_plain)
                if is_offered and specialization.store == store and specialization.is_plain == is_plain:
                    yield specialization, tile.config


def _wgmma_members(shown: Problem, target: Target) -> Iterator[tuple[Specialization, Config]]:
    for batch, a_major, b_major, is_boxed_out in itertools.product((1, 2), "km", "nk", (True, False)):
        problem = replace(shown, batch=batch, a_major=a_major, b_major=b_major, is_boxed_out=is_boxed_out)
        for tile in tiles_for(problem, target) if has_wgmma(problem, target) else ():
            is_offered = tile.all_layouts or (batch == 1 and is_main(problem))
            is_stored = (tile.store == "scalar") != is_boxed_out
            if tile.config.kernel == "wgmma" and is_offered and is_stored and fits_boxes(problem, tile.config):
                for is_plain in (True, False) if is_boxed_out else (False,):
                    yield specialization_of(problem, tile.config, is_plain=is_plain), tile.config
                for splits in CLUSTERS if shares_k(problem, tile.config) else ():
                    shared = replace(tile.config, split_k=splits)
                    if fits_inbox(problem, shared, target):
                        yield specialization_of(problem, shared, is_plain=False), tile.config


def _interpreted_members(shown: Problem) -> Iterator[tuple[Specialization, Config]]:
    flags = (True, False)
    for out_dtype, is_boxed, is_plain in itertools.product(OUT_DTYPES[shown.dtype], flags, flags):
        for a_major, b_major in itertools.product("km", "nk"):
            problem = replace(shown, m=FEW_ROWS + 1, out_dtype=out_dtype, is_boxed_out=is_boxed)
            problem = replace(problem, a_major=a_major, b_major=b_major)
            for is_aligned_out in (True, is_boxed):
                stored = replace(problem, is_aligned_out=is_aligned_out)
                read_by = replace(INTERPRETED_TMA, is_copied=takes_limbs(problem, "tma"))
                yield specialization_of(stored, read_by, is_plain=is_plain), INTERPRETED_TMA


def is_scalar(dtype: str, precision: str, target: Target) -> bool:
    """Whether products run without a matrix unit."""
    return dtype == "float32" and resolve_precision(precision, target) == "ieee"


def can_split(config: Config) -> bool:
    """Whether several programs may share a tile of `config`."""
    if config.kernel == "element":
        return False
    if config.kernel == "wgmma":
        is_small = config.block_m * config.block_n <= MAX_CLUSTER_SUMS
        return is_small and not (config.shares or boxes_of(right_of(config))[1])
    # Adding up the parts takes as many registers again as the tile.
    is_large = config.block_m * config.block_n > MAX_SPLIT_ELEMENTS * 32 * config.num_warps
    return not (is_large or config.is_persistent)


def launched_on(problem: Problem, config: Config, target: Target) -> int:
    """Programs for each multiprocessor that a grid has where they take tile after tile."""
    if config.kernel != "wgmma":
        return 1
    return programs_on(config, ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.out_dtype], target.shared_bytes)


def is_cluster(config: Config) -> bool:
    """Whether programs of `config` are launched in clusters."""
    return config.kernel == "wgmma" and (config.split_k > 1 or config.sharers > 1)


def room_of(problem: Problem, config: Config, target: Target) -> int:
    """Programs that run at once, where a grid is not larger than that."""
    places = target.num_sms * launched_on(problem, config, target)
    size = max(config.sharers, config.split_k) if is_cluster(config) else 1
    return max(size, int(places * (_CLUSTERED if size > 2 else 1.0)) // size * size)


def _finds_room(problem: Problem, config: Config, target: Target) -> bool:
    """Whether clusters that share K all find room at once, and those that share an operand take no more turns than others."""
    programs = config.tiles(problem) * config.split_k
    room = room_of(problem, config, target)
    if config.split_k > 1:
        return config.split_k in CLUSTERS and programs <= room and fits_inbox(problem, config, target)
    # Sharing may repeat the last tile of a side, too.
    alone = replace(config, shares="")
    return cdiv(programs, room) == cdiv(alone.tiles(problem), room_of(problem, alone, target))


def fits_inbox(problem: Problem, config: Config, target: Target) -> bool:
    """Whether programs of the kernel for Hopper that share K have room for the sums that they send and get."""
    item_bytes, out_bytes = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.out_dtype]
    stages = stages_beside(config, item_bytes, out_bytes, config.split_k, target.shared_bytes)
    return stages >= min(_MIN_STAGES, config.num_stages)


def shares_k(problem: Problem, config: Config) -> bool:
    """Whether several programs may share a tile of `problem`."""
    return (config.kernel != "wgmma" or problem.batch == 1) and can_split(config)


def arithmetic_of(problem: Problem) -> str:
    """The key of the tables: what the matrix unit multiplies."""
    if problem.dtype == "float32":
        return problem.precision
    if problem.dtype.startswith("float8"):
        return "float8 fast" if problem.precision == "fast" else "float8"
    return "int8" if problem.dtype == "int8" else "half"


def is_sensible(problem: Problem, config: Config, target: Target) -> bool:
    """Whether the kernel of `config` can read and write `problem`, its split of K leaves work, and its clusters find room."""
    if config.split_k > 1:
        steps, tiles = cdiv(problem.k, config.block_k), config.tiles(problem)
        is_too_fine = steps < 2 * config.split_k or tiles * config.split_k > MAX_WAVES * target.num_sms
        if is_too_fine or not shares_k(problem, config):
            return False
    if is_cluster(config) and not _finds_room(problem, config, target):
        return False
    if config.is_copied and not can_copy(problem, config.kernel):
        return False
    if config.kernel == "vector":
        return has_vectors(problem) and config.block_m // 2 < problem.m <= config.block_m
    if config.kernel == "element":
        return problem.k <= MAX_ELEMENT_K * config.lanes
    read = as_read(problem, config)
    if config.kernel == "wgmma":
        return has_wgmma(read, target) and fits_boxes(read, config)
    if config.kernel == "fma":
        return has_fma(read, target)
    return config.kernel != "tma" or read.is_padded_in


# By arithmetic: kernels that may pay for copies of their operands. All others: `BOX_KERNELS`.
_COPYING = {"ieee": {"pointer", "fma"}, "tf32x3": {"fma", *LIMB_KERNELS}}


def can_copy(problem: Problem, kernel: str) -> bool:
    """Whether copying operands first makes a difference to `kernel` that may pay."""
    meant = _COPYING.get(arithmetic_of(problem), BOX_KERNELS)
    if not (kernel in meant and problem.is_copyable and any(copied_operands(problem, kernel))):
        return False
    elements = problem.batch * problem.k * (problem.m + problem.n) * (LIMBS_OF_K if takes_limbs(problem, kernel) else 1)
    return elements * ITEM_BYTES[problem.dtype] <= MAX_COPIED_BYTES


def is_possible(problem: Problem, config: Config, target: Target, *, is_plain: bool) -> bool:
    """Whether there is a binary of `config` for `problem`, and using it is sensible."""
    if not is_sensible(problem, config, target):
        return False
    return whole_of(config) in built_for(specialization_of(problem, config, is_plain=is_plain), target)


def whole_of(config: Config) -> Config:
    """The configuration of the binary: tiles not shared, nothing said of copies."""
    return replace(config, split_k=1, is_copied=False)


def built_for(specialization: Specialization, target: Target) -> Collection[Config]:
    """The configurations, with one split, that the catalogue has a binary of for `specialization`."""
    return by_specialization(target).get(specialization, ())


@functools.cache
def by_specialization(target: Target) -> dict[Specialization, dict[Config, None]]:
    """Configurations of each specialization, in the order of `members`; filled when the catalogue is listed, by no request."""
    found: dict[Specialization, dict[Config, None]] = defaultdict(dict)
    for specialization, config in members(target):
        found[specialization][config] = None
    return dict(found)
