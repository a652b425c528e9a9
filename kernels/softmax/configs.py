"""Which softmax kernel runs, with which blocks. Pure: no torch, no Triton, no device.

By the length of a row: short rows share a program, middling ones are held whole in registers, long ones are read twice,
and when rows are too few to occupy the device each is split over programs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import is_tuned, table_for

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
DTYPES = tuple(ITEM_BYTES)
# How many parts of one row the merging kernel holds.
MAX_SPLITS = 512
# Elements of a row that one program can hold.
LONGEST_ROW = 32768
# Up to here short rows that are read element by element get wider blocks, of fewer rows.
FEW_ROWS_PER_SM = 16
# More than any device counts as few.
MANY_ROWS = 1 << 20


@dataclass(frozen=True)
class Problem:
    """One softmax as the choice of a kernel sees it.

    Attributes:
        rows: independent rows.
        n: elements of a row.
        dtype: name of the input's dtype.
        out_dtype: name of the output's dtype.
        is_contiguous: whether elements of a row follow one another, in input and output.
        is_aligned: whether rows can be read and written in 16-byte pieces.
        log: whether the logarithm of the softmax is wanted.
    """

    rows: int
    n: int
    dtype: str
    out_dtype: str
    is_contiguous: bool = True
    is_aligned: bool = True
    log: bool = False


@dataclass(frozen=True)
class Config:
    """Blocks and compiler options of one launch.

    Attributes:
        kernel: `row` (whole rows in registers), `loop` (a row read twice), `team` (a row in the registers of several
            programs), `split` (a row over several programs, read twice) or `column` (rows lie across memory).
        block_rows: rows of one program.
        block_n: elements of a row held at a time.
        num_warps: warps of one program.
        splits: programs of one row, for `split` and `team`.
        programs_per_sm: programs on each multiprocessor, for `team`.
    """

    kernel: str
    block_rows: int
    block_n: int
    num_warps: int
    splits: int = 1
    programs_per_sm: int = 1


LOOP = Config("loop", 1, 4096, 8)
SPLIT = Config("split", 1, 4096, 8)
_COLUMN = Config("column", 32, 32, 4)


def choose_by_table(problem: Problem, target: Target) -> Config:
    """The configuration that the table's blocks and teams give, and built-in ones where it has none."""
    if target.backend == "interpreter":
        return _choose_interpreted(problem)
    if not problem.is_contiguous:
        return _COLUMN
    return _choose_long(problem, target) if is_long(problem, target) else _choose_whole(problem, target)


def is_long(problem: Problem, target: Target) -> bool:
    """Whether a row is shared by programs, or read twice: too long for one, or too few to fill the device."""
    return problem.n > LONGEST_ROW or (problem.n >= LONGEST_ROW // 2 and 2 * problem.rows <= target.num_sms)


def members(target: Target) -> Iterator[tuple[Problem, Config]]:
    """For every binary that `choose` can ask for on `target`, a problem and a configuration that stand for it."""
    if target.backend == "interpreter":
        yield from _interpreted_members()
        return
    for dtype, out_dtype, log in itertools.product(DTYPES, DTYPES, (False, True)):
        yield Problem(1, 1, dtype, out_dtype, is_contiguous=False, is_aligned=False, log=log), _COLUMN
        for is_aligned in (True, False):
            problem = Problem(1, 1, dtype, out_dtype, is_aligned=is_aligned, log=log)
            block_n = _shortest_block(problem)
            while block_n <= LONGEST_ROW:
                yield problem, _choose_whole(replace(problem, rows=MANY_ROWS, n=block_n), target)
                if dtype == out_dtype:
                    yield from ((problem, config) for config in _more_blocks(problem, block_n, target))
                block_n *= 2
            yield from ((problem, config) for config in (LOOP, SPLIT))
            team = team_of(target, ITEM_BYTES[dtype], is_aligned=is_aligned)
            if team is not None:
                # Up to 16 programs of a row are merged by one binary, more by another.
                lengths = [max(programs * int(team["block_n"]), LONGEST_ROW + 1) for programs in (16, 17)]
                yield from ((problem, _choose_long(replace(problem, n=length), target)) for length in lengths)


def _choose_whole(problem: Problem, target: Target) -> Config:
    """Rows whole in registers, as measured for the next power of two, else 16 elements a thread."""
    item_bytes = ITEM_BYTES[problem.dtype]
    block_n = max(power_of_two(problem.n), _shortest_block(problem))
    measured = rows_of(target, item_bytes, is_aligned=problem.is_aligned)
    if not measured:
        if problem.rows <= FEW_ROWS_PER_SM * target.num_sms and not problem.is_aligned:
            # Element by element, a block of many short rows is a long chain for each thread; few rows have programs to spare.
            block_n = max(block_n, 1024 // item_bytes)
        measured = rows_of(target, item_bytes, is_aligned=True)
    for entry in measured:
        if entry["block_n"] == max(block_n, measured[0]["block_n"]):
            return _of_length(entry, block_n)
    if block_n <= 1024:
        return Config("row", 2048 // block_n, block_n, 4)
    return Config("row", 1, block_n, min(16, max(4, block_n // 512)))


def _of_length(entry: Mapping[str, Any], block_n: int) -> Config:
    """The blocks of `entry` for rows that may be shorter: as many elements, of more rows."""
    return Config("row", entry["block_rows"] * entry["block_n"] // block_n, block_n, entry["num_warps"])


def _more_blocks(problem: Problem, block_n: int, target: Target) -> Iterator[Config]:
    """Second blocks for a length, which are better for more rows or for fewer. Costs choose them, the table alone does not."""
    measured = rows_of(target, ITEM_BYTES[problem.dtype], is_aligned=problem.is_aligned)
    for entry in measured:
        if entry.get("is_more") and entry["block_n"] == max(block_n, measured[0]["block_n"]):
            yield _of_length(entry, block_n)


def _choose_long(problem: Problem, target: Target) -> Config:
    """A row over a team of programs where they can be kept together, else read twice."""
    entry = team_of(target, ITEM_BYTES[problem.dtype], is_aligned=problem.is_aligned)
    if entry is not None:
        team = -(-problem.n // entry["block_n"])
        # How many programs fit beside one another was only measured on the table's own device.
        programs_per_sm = entry["programs_per_sm"] if is_tuned(target) else 1
        if team <= min(MAX_SPLITS, target.num_sms * programs_per_sm):
            return Config("team", 1, entry["block_n"], entry["num_warps"], team, programs_per_sm)
    return without_team(problem, target)


def entry_key(item_bytes: int, *, is_aligned: bool) -> str:
    """What a table keeps blocks and teams by: bytes of an element, and how rows are read."""
    return str(item_bytes) if is_aligned else f"{item_bytes} elements"


def rows_of(target: Target, item_bytes: int, *, is_aligned: bool) -> list[dict[str, Any]]:
    """The blocks that were measured for rows read so, by rising length, then second ones; nothing where none were."""
    rows = table_for(target).get("softmax", {}).get("rows", {})
    found: list[dict[str, Any]] = rows.get(entry_key(item_bytes, is_aligned=is_aligned), [])
    return found


def team_of(target: Target, item_bytes: int, *, is_aligned: bool) -> dict[str, Any] | None:
    """The team for long rows read so; None where they are better read twice, or nothing was measured."""
    return own_or_alike(table_for(target).get("softmax", {}).get("team", {}), item_bytes, is_aligned=is_aligned)


def own_or_alike(teams: Mapping[str, Any], item_bytes: int, *, is_aligned: bool) -> dict[str, Any] | None:
    """The entry of a table's `teams` for rows read so, which may say that there is none."""
    key = entry_key(item_bytes, is_aligned=is_aligned)
    if key not in teams and item_bytes == 4:
        # What holds rows in 16-byte pieces also does element by element; 16-bit rows spill then, more than twice slower.
        key = entry_key(item_bytes, is_aligned=True)
    found: dict[str, Any] | None = teams.get(key)
    return found


def without_team(problem: Problem, target: Target) -> Config:
    """A long row read twice: by one program, or by several where rows are few."""
    return read_twice(problem, _splits(problem, target))


def read_twice(problem: Problem, splits: int) -> Config:
    """A row by `splits` programs, or by as many as have something to do."""
    splits = min(splits, -(-problem.n // SPLIT.block_n))
    return replace(SPLIT, splits=splits) if splits > 1 else LOOP


def power_of_two(amount: int) -> int:
    """The smallest power of two that is at least `amount`, and at least 16."""
    return max(16, 1 << (amount - 1).bit_length())


def _shortest_block(problem: Problem) -> int:
    """The rarer a pair of types, the fewer binaries it has."""
    return 16 if problem.dtype == problem.out_dtype else 128


def _interpreted_members() -> Iterator[tuple[Problem, Config]]:
    flags = (True, False)
    for dtype, out_dtype, is_aligned, log in itertools.product(DTYPES, DTYPES, flags, flags):
        problem = Problem(1, 1, dtype, out_dtype, is_aligned=is_aligned, log=log)
        for rows, n in ((2, 16), (2, 32), (2, 64), (1, 65), (2, 65)):
            yield problem, _choose_interpreted(replace(problem, rows=rows, n=n))
        if not is_aligned:
            apart = replace(problem, is_contiguous=False)
            yield apart, _choose_interpreted(apart)


def _choose_interpreted(problem: Problem) -> Config:
    if not problem.is_contiguous:
        return Config("column", 16, 16, 4)
    if problem.n <= 64:
        return Config("row", 2, power_of_two(problem.n), 4)
    return Config("split", 1, 32, 4, 3) if problem.rows == 1 else Config("loop", 1, 32, 4)


def _splits(problem: Problem, target: Target) -> int:
    """Programs for each row such that all rows fill the device, no program with less than one block."""
    if problem.rows >= target.num_sms:
        return 1
    wanted = max(1, 2 * target.num_sms // max(1, problem.rows))
    return min(wanted, -(-problem.n // 4096), MAX_SPLITS)
