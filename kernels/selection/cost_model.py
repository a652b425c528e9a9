"""A model of the time that a launch takes, with costs that were fitted to measurements of a device. Pure; knows no op.

An op describes a launch as `Work`. Its configuration's `Costs` turn that into microseconds in two steps: a sum of what
programs do one after the other, in which steps, bytes and loads hide behind one another; then a factor, the exponential
of a weighted sum of features such as the logarithms of sizes, for what the sum does not know. Both are fitted so that
the candidates for one product compare rightly; the absolute time is of less account. `kernels.autotune.fitting` fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, NamedTuple, TypeAlias

Numbers: TypeAlias = tuple[float, ...]

# What `Costs.us` are for, in order.
TERMS = (
    "start",
    "wave",
    "turn",
    "store",
    "step of a wave",
    "step of a turn",
    "mean step",
    "megabyte read",
    "megabyte written",
    "megabyte loaded",
    "split",
    "part",
    "megabyte exchanged",
    "megabyte summed",
)
# What `Costs.layout` are for: the exponents of the factor of a step.
LAYOUTS = ("a across", "b across", "both across", "rows filled", "columns filled")
# What `Costs.bend` are for: what lasts whatever the splits, then what changes with them, by what it is multiplied with.
BENDS = (
    *("one", "rows filled", "columns filled", "finish", "a across", "b across", "batched"),
    *("rows", "columns", "length", "share", "share finishing", "level", "level above", "level squared"),
    *("depth", "depth a across", "depth b across", "depth of rows filled", "depth of columns filled", "depth share"),
    *("loose", "loose share", "splits", "share splitting", "last turn", "last wave"),
)
# Fitted factors are believed up to here, either way.
_MOST_BEND = 0.6
# Up to this many programs for each multiprocessor, a last wave that is not full shows.
_MANY_TURNS = 12
# The larger, the better the longest of steps, bytes and loads hides the others.
_SHARPNESS = 4.0


class Work(NamedTuple):
    """One launch as the model sees it, but for its splits.

    Attributes:
        tiles: programs of an unsplit launch.
        steps: of the loop of one such program.
        read_mb: megabytes of all operands.
        written_mb: megabytes of the output.
        step_mb: megabytes that one program loads in a step.
        tile_mb: megabytes of a tile's float32 sums.
        rows_filled: how much of the tiles' rows there is, up to 1.
        columns_filled: how much of their columns.
        is_finished: 1 where something follows the product.
        a_across: 1 where the operand's contiguous dimension is not the common one.
        b_across: the same for the other operand.
        is_batched: 1 for several products in one launch.
        loose: 1 where the output is stored in the slower way; without and with splits.
        logs: of rows, columns and length, to base 2.
    """

    tiles: int
    steps: int
    read_mb: float
    written_mb: float
    step_mb: float
    tile_mb: float = 0.0
    rows_filled: float = 1.0
    columns_filled: float = 1.0
    is_finished: float = 0.0
    a_across: float = 0.0
    b_across: float = 0.0
    is_batched: float = 0.0
    loose: tuple[float, float] = (0.0, 0.0)
    logs: tuple[float, float, float] = (8.0, 8.0, 8.0)


@dataclass(frozen=True)
class Costs:
    """What a configuration was fitted to cost on a device.

    Attributes:
        programs_per_sm: how many run on one multiprocessor at a time.
        us: microseconds, by `TERMS`.
        layout: by `LAYOUTS`.
        bend: by `BENDS`.
    """

    programs_per_sm: int
    us: Numbers
    layout: Numbers
    bend: Numbers

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Costs:
        """The costs in an entry of a table."""
        return cls(entry["programs_per_sm"], *(tuple(entry[name]) for name in ("us", "layout", "bend")))


class Forecast:
    """What a launch is predicted to take, at any number of splits.

    Args:
        work: the launch.
        costs: of its configuration.
        num_sms: multiprocessors of the device.
    """

    __slots__ = ("_bends", "_costs", "_num_sms", "_slowdown", "_work")

    def __init__(self, work: Work, costs: Costs, num_sms: int) -> None:
        self._work = work
        self._costs = costs
        self._num_sms = num_sms
        self._slowdown = math.exp(sum(map(mul, costs.layout, layouts(work))))
        self._bends = _folded(work, costs.bend)

    def us(self, splits: int) -> float:
        """Microseconds when each tile is shared by `splits` programs."""
        costs = self._costs
        whole = blended(costs.us, self._slowdown, amounts(self._work, splits, costs.programs_per_sm, self._num_sms))
        return float(whole * math.exp(max(-_MOST_BEND, min(self.bend(splits), _MOST_BEND))))

    def bend(self, splits: int) -> float:
        """The logarithm of the factor, a sum that is linear in `Costs.bend`."""
        lasting, of_share, of_level, of_level_above, of_level_squared, of_depth, of_depth_share = self._bends[:7]
        of_loose, of_loose_share, of_splits, of_share_splitting, of_last_turn, of_last_wave = self._bends[7:]
        work, num_sms, programs_per_sm = self._work, self._num_sms, self._costs.programs_per_sm
        programs = work.tiles * splits
        fullness = programs / num_sms
        share = 1.0 if fullness > 1 else fullness
        level = max(-6.0, min(math.log2(fullness), 4.0)) / 3
        depth = math.log2(-(-work.steps // splits)) / 3
        bend = lasting + of_share * share + of_level * level + of_level_squared * level * level
        bend += (of_depth + of_depth_share * share) * depth
        if work.loose[splits > 1]:
            bend += of_loose + of_loose_share * share
        if splits > 1:
            bend += of_splits * math.log2(splits) + of_share_splitting * share
        if fullness > 1:
            bend += of_level_above * level + of_last_turn * (-(-programs // num_sms) / fullness - 1)
            if programs_per_sm > 1 and fullness < _MANY_TURNS:
                waves = -(-programs // (num_sms * programs_per_sm))
                bend += of_last_wave * (waves * programs_per_sm / fullness - 1)
        return bend


def _folded(work: Work, bend: Numbers) -> Numbers:
    """`bend` with what lasts whatever the splits taken together: much of the time that a choice takes is spent here."""
    one, rows_filled, columns_filled, finish, a_across, b_across, batched, rows, columns, length = bend[:10]
    share, share_finish, level, level_above, level_squared, depth, depth_a, depth_b, depth_m, depth_n = bend[10:20]
    filled_m, filled_n, finished, across_a, across_b = work[6:11]
    log_rows, log_columns, log_length = work.logs
    sizes = rows * (log_rows - 8) + columns * (log_columns - 8) + length * (log_length - 8)
    facts = finish * finished + a_across * across_a + b_across * across_b + batched * work.is_batched
    return (
        one + rows_filled * filled_m + columns_filled * filled_n + facts + sizes / 4,
        share + share_finish * finished,
        level,
        level_above,
        level_squared,
        depth + depth_a * across_a + depth_b * across_b + depth_m * filled_m + depth_n * filled_n,
        *bend[20:],
    )


def blended(us: Sequence[Any], slowdown: Any, amounts: Sequence[Any]) -> Any:
    """The sum: of floats, or of arrays of one value for each launch.

    Args:
        us: by `TERMS`.
        slowdown: the factor of a step.
        amounts: as `amounts` gives them, in the order of `TERMS`.
    """
    start, wave, turn, store, wave_step, turn_step, mean_step, read, written, loaded, split, part, exchange, summing = (
        us
    )
    one, waves, turns, stores, wave_steps, turn_steps, mean_steps = amounts[:7]
    read_mb, written_mb, loaded_mb, is_split, parts, exchanged_mb, summed_mb = amounts[7:]
    steps_us = slowdown * (wave_step * wave_steps + turn_step * turn_steps + mean_step * mean_steps)
    bytes_us = read * read_mb + written * written_mb
    loads_us = loaded * loaded_mb
    flowing_us = (steps_us**_SHARPNESS + bytes_us**_SHARPNESS + loads_us**_SHARPNESS) ** (1 / _SHARPNESS)
    split_us = split * is_split + part * parts + exchange * exchanged_mb + summing * summed_mb
    return start * one + wave * waves + turn * turns + store * stores + flowing_us + split_us


def amounts(work: Work, splits: int, programs_per_sm: int, num_sms: int) -> Numbers:
    """How often each of `TERMS` comes in a launch."""
    programs = work.tiles * splits
    steps = -(-work.steps // splits)
    # A wave is what the device runs at once; a turn, one program of each multiprocessor.
    waves = -(-programs // (num_sms * programs_per_sm))
    turns = -(-programs // num_sms)
    stored = turns * work.rows_filled * work.columns_filled
    steps_of = (waves * steps, turns * steps, programs * steps / num_sms)
    moved = (work.read_mb, work.written_mb, programs * steps * work.step_mb)
    if splits == 1:
        return (1.0, waves, turns, stored, *steps_of, *moved, 0.0, 0.0, 0.0, 0.0)
    parts_mb = splits * work.tile_mb
    return (1.0, waves, turns, stored, *steps_of, *moved, 1.0, splits, parts_mb * work.tiles, parts_mb)


def layouts(work: Work) -> Numbers:
    """The features of `LAYOUTS`."""
    a_across, b_across = work.a_across, work.b_across
    return (a_across, b_across, a_across * b_across, work.rows_filled - 1, work.columns_filled - 1)
