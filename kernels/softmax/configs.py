"""Softmax as the choice of a kernel sees it, all that can be chosen, and the choice. Pure: no torch, no Triton, no device.

Short rows share a program, middling ones are held whole in registers, long ones are held by a group of programs or read
twice. When rows are too few to occupy the device each is split over programs. The least predicted time is chosen. Rows that
lie across memory, and the shortest ones, have blocks by their length and number.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES, unit_of
from tilewire.kernels.runtime.targets import INTERPRETER, Target
from tilewire.kernels.selection.cost_model import Amounts, Model, Term, Tile, tile_of
from tilewire.kernels.selection.tables import table_for, table_name
from tilewire.kernels.softmax.across import block_for, blocks_for, counts_side_by_side, is_across

# How many parts of one row the merging kernel holds.
MAX_SPLITS = 512
# Members of a group up to which the smaller of its two binaries merges them.
SMALL_GROUP = 16
# Elements of a row that one program can hold.
LONGEST_ROW = 32768

# Terms of the time of a softmax; `amounts_of` has the amount of each.
MODEL = Model(
    Term("launch", "launches", 2.0),
    Term("turn", "programs that follow one another on a multiprocessor", 0.05),
    Term("crowd", "1 where multiprocessors have several programs of more than one warp", 0.2),
    Term("exchange", "rows that a group does, one after the other", 1.5),
    Term("memory", "µs at the memory's bandwidth", 1.15),
    Term("again", "µs at the memory's bandwidth for a second read", 0.6),
    Term("elements", "µs for what one multiprocessor's threads hold, 256 elements each", 1.0),
    Term("alone", "the same, for elements that are read one by one", 0.5),
)


@dataclass(frozen=True)
class Problem:
    """One softmax as the choice of a kernel sees it.

    Attributes:
        rows: Independent rows.
        n: Elements of a row.
        dtype: Name of the input's dtype.
        out_dtype: Name of the output's dtype.
        is_contiguous: Whether elements of a row follow one another, in input and output.
        is_aligned: Whether rows can be read and written in 16-byte pieces.
        log: Whether the result is the logarithm of the softmax.
        side_by_side: Rows that are read at once, where elements do not follow one another.
    """

    rows: int
    n: int
    dtype: str
    out_dtype: str
    is_contiguous: bool = True
    is_aligned: bool = True
    log: bool = False
    side_by_side: int = 1

    @property
    def is_rare(self) -> bool:
        """Whether the pair of types has fewer binaries."""
        return self.dtype != self.out_dtype

    @property
    def is_across(self) -> bool:
        """Whether `across` computes it: a program has rows side by side."""
        return is_across(
            self.n,
            SHORT_N,
            is_contiguous=self.is_contiguous,
            is_aligned=self.is_aligned,
            side_by_side=self.side_by_side,
        )

    @property
    def is_copied(self) -> bool:
        """Whether the rows are copied first, so that their elements follow one another."""
        return not self.is_contiguous and not self.is_across


@dataclass(frozen=True)
class Config:
    """Blocks and compiler options of one launch.

    Attributes:
        kernel: `row` (whole rows in registers), `loop` (a row read twice), `cooperative` (a row in the registers of several
            programs), `split` (a row over several programs, read twice) or `across` (rows side by side, held or read twice).
        block_rows: Rows of one program.
        block_n: Elements of a row held at a time.
        num_warps: Warps of one program.
        splits: Programs of one row, for `split` and `cooperative`.
        programs_per_sm: Programs on each multiprocessor, for `cooperative`.
        tail_n: Elements of a row that are held beside the block, for `row`.
    """

    kernel: str
    block_rows: int
    block_n: int
    num_warps: int
    splits: int = 1
    programs_per_sm: int = 1
    tail_n: int = 0

    @property
    def held_n(self) -> int:
        """Elements of a row that one program holds."""
        return self.block_n + self.tail_n


LOOP = Config("loop", 1, 4096, 8)
SPLIT = Config("split", 1, 4096, 8)
# Elements up to which rows that are read one by one take the blocks of rows across memory.
SHORT_N = 4
# Up to so many rows a multiprocessor of those across memory are few, and threads share each: 16,849 rows of 944 elements took
# 172 µs with them and 252 without, 40,000 of 300 120 and 100 (H200).
_FEW_ROWS = 128
# Elements of the narrowest rows.
_NARROWEST = 4
# Rarer pairs of types have one configuration for each length from this on.
_SHORTEST_OF_RARE = 128


def key_of(problem: Problem) -> str:
    """Section of the table: bytes of an element, and whether each is read by itself."""
    return f"{ITEM_BYTES[problem.dtype]}{'' if problem.is_aligned else ' scalar'}"


@functools.cache
def tiles_of(key: str, target: Target) -> tuple[Tile, ...]:
    """The tiles of a section of the device's table, and the two kernels that read a row twice."""
    section = table_for(target).get("softmax", {}).get(key, {"tiles": []})
    defaults = section.get("costs", {})
    listed = [tile_of(Config, MODEL, entry, defaults) for entry in section["tiles"]]
    for config in (LOOP, SPLIT):
        if config not in [tile.config for tile in listed]:
            listed.append(Tile(config, MODEL.costs({}, defaults), all_layouts=True))
    return tuple(listed)


def members(target: Target) -> Iterator[tuple[Problem, Config]]:
    """For every binary that `select` can ask for on `target`, a problem and a configuration that stand for it."""
    if target.backend == "interpreter":
        yield from _interpreted_members()
        return
    for dtype, out_dtype in itertools.product(FLOATS, FLOATS):
        yield from _across_members(dtype, out_dtype, target)
        for is_aligned in (True, False):
            problem = Problem(1, 1, dtype, out_dtype, is_aligned=is_aligned)
            for tile in tiles_for(problem, target):
                if tile.config.kernel == "cooperative":
                    # Two binaries: for groups of up to 16, and for larger ones.
                    yield from ((problem, replace(tile.config, splits=size)) for size in (SMALL_GROUP, SMALL_GROUP + 1))
                else:
                    yield problem, tile.config


def _across_members(dtype: str, out_dtype: str, target: Target) -> Iterator[tuple[Problem, Config]]:
    """The members for rows that lie across memory."""
    for count in counts_side_by_side(dtype, out_dtype):
        problem = Problem(1, 1, dtype, out_dtype, is_contiguous=False, is_aligned=False, side_by_side=count)
        yield from ((problem, Config("across", *block)) for block in blocks_for(target, count))


def _across_config(problem: Problem, target: Target) -> Config:
    """The one configuration of rows side by side."""
    is_few = problem.rows <= _FEW_ROWS * target.num_sms
    count = problem.side_by_side
    block = block_for(problem.n, target, is_contiguous=problem.is_contiguous, side_by_side=count, is_few=is_few)
    return Config("across", *block)


def tiles_for(problem: Problem, target: Target) -> Iterator[Tile]:
    """The tiles that are built for the types of `problem`."""
    is_rare = problem.is_rare
    unit = unit_of(problem.dtype, is_aligned=problem.is_aligned)
    for tile in tiles_of(key_of(problem), target):
        # Rows of whole pieces are no shorter than one.
        if tile.config.held_n < unit:
            continue
        if not is_rare or (tile.all_layouts and tile.config.block_n >= _SHORTEST_OF_RARE):
            yield tile


def is_long(problem: Problem, target: Target) -> bool:
    """Whether a row is shared by programs, or read twice: too long for one, or too few to fill the device."""
    return problem.n > LONGEST_ROW or (problem.n >= LONGEST_ROW // 2 and 2 * problem.rows <= target.num_sms)


def power_of_two(amount: int) -> int:
    """The smallest power of two that is at least `amount`, and at least `_NARROWEST`."""
    return max(_NARROWEST, 1 << (amount - 1).bit_length())


def _interpreted_members() -> Iterator[tuple[Problem, Config]]:
    flags = (True, False)
    for dtype, out_dtype, is_aligned in itertools.product(FLOATS, FLOATS, flags):
        problem = Problem(1, 1, dtype, out_dtype, is_aligned=is_aligned)
        for rows, n in ((2, 4), (2, 8), (2, 16), (2, 32), (2, 48), (2, 64), (1, 65), (2, 65)):
            # Rows of whole pieces are no shorter than one.
            if n >= unit_of(dtype, is_aligned=is_aligned):
                yield problem, choose_interpreted(replace(problem, rows=rows, n=n))
        if not is_aligned:
            yield from _across_members(dtype, out_dtype, INTERPRETER)


def choose_interpreted(problem: Problem) -> Config:
    """Small blocks, which reach every tail and loop of the kernels at sizes that an interpreter can do."""
    if problem.is_across:
        return _across_config(problem, INTERPRETER)
    if problem.n <= 64:
        if problem.n > 32 and problem.n <= 48:
            return Config("row", 2, 32, 4, tail_n=16)
        unit = unit_of(problem.dtype, is_aligned=problem.is_aligned)
        return Config("row", 2, max(unit, power_of_two(problem.n)), 4)
    return Config("split", 1, 32, 4, 3) if problem.rows == 1 else Config("loop", 1, 32, 4)


# ── choice ──────────────────────────────────────────────────────────────────────────────────────────


# Elements that the threads of a multiprocessor take in a microsecond, for the term `elements`.
_ELEMENTS_PER_US = 256 * 64
# Blocks wider than this are left out where a narrower one holds the row.
_WIDE_BYTES = 1024


def select(problem: Problem, target: Target) -> Config:
    """The configuration for `problem` on `target`.

    Args:
        problem: The softmax.
        target: The device.
    """
    if target.backend == "interpreter":
        return choose_interpreted(problem)
    if problem.is_across:
        return _across_config(problem, target)

    def predicted_us(found: tuple[Config, Tile]) -> float:
        return MODEL.us(found[1].costs, amounts_of(problem, found[0], target))

    return min(_possible(problem, target), key=predicted_us)[0]


def explain(problem: Problem, target: Target) -> str:
    """One line: what `select` gives `problem`, and the terms of its predicted time."""
    if problem.is_copied:
        unit = unit_of(problem.dtype, is_aligned=True)
        rows = replace(problem, is_contiguous=True, is_aligned=problem.n % unit == 0)
        return f"{explain(rows, target)}; rows lie across memory and are copied first"
    chosen = select(problem, target)
    words = (
        f"{chosen.kernel} {chosen.block_rows}x{chosen.held_n}, {chosen.num_warps} warps, {chosen.splits} programs a row"
    )
    head = f"{problem.dtype} {problem.rows}x{problem.n} by table {table_name(target)}: {words}"
    if problem.is_across:
        which = "short rows that are read one by one" if problem.is_contiguous else "rows that lie across memory"
        return f"{head}, for {which}"
    tile = dict(_possible(problem, target)).get(chosen)
    if tile is None:
        return f"{head}, for the interpreter"
    amounts = amounts_of(problem, chosen, target)
    return f"{head}, {MODEL.us(tile.costs, amounts):.1f} µs = {MODEL.explained(tile.costs, amounts)}"


def select_invariant(problem: Problem, target: Target) -> Config:
    """A configuration that does not depend on the number of rows: a row's bits are the same among any others."""
    return select(replace(problem, rows=target.num_sms), target)


def possible(problem: Problem, target: Target) -> Iterator[Config]:
    """Every member of the catalogue that can compute `problem`, at every sensible number of programs for a row."""
    if problem.is_across:
        return iter((_across_config(problem, target),))
    return (config for config, _ in _possible(problem, target))


def _possible(problem: Problem, target: Target) -> Iterator[tuple[Config, Tile]]:
    n, rows = problem.n, problem.rows
    tiles = tuple(tiles_for(problem, target))
    holding = (tile.config.held_n for tile in tiles if tile.config.kernel == "row" and tile.config.held_n >= n)
    widest = max(_WIDE_BYTES // ITEM_BYTES[problem.dtype], power_of_two(min(holding, default=1)))
    has_rows = False
    for tile in tiles:
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
        is_crowded = False
    else:
        exchanges = 0
        programs = -(-problem.rows // config.block_rows) * config.splits
        turns = -(-programs // target.num_sms)
        is_crowded = turns > 1 and config.num_warps > 1
        blocks = -(-problem.n // (config.held_n * config.splits))
        held = turns * config.block_rows * config.held_n * blocks * (2 if is_again else 1)
    elements_us = held / _ELEMENTS_PER_US
    return (
        2.0 if config.kernel == "split" else 1.0,
        float(turns),
        float(is_crowded),
        float(exchanges),
        (read + written) / target.bytes_per_us,
        read / target.bytes_per_us if is_again else 0.0,
        elements_us,
        0.0 if problem.is_aligned else elements_us,
    )
