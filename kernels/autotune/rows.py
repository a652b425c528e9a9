"""Tuning softmax: blocks for rows held whole, by length, and the team for longer ones. Launches nothing.

Rows that are read in 16-byte pieces and rows that are read element by element have entries of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tilewire.kernels.autotune import space
from tilewire.kernels.autotune.compiling import Recipe
from tilewire.kernels.autotune.racing import Times
from tilewire.kernels.autotune.selection import LEAST_GAIN, relative
from tilewire.kernels.autotune.session import Session
from tilewire.kernels.autotune.workloads import Rows, geomean
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import (
    ITEM_BYTES,
    LONGEST_ROW,
    MAX_SPLITS,
    Config,
    Problem,
    choose_by_table,
    entry_key,
    is_long,
    own_or_alike,
    power_of_two,
    rows_of,
    team_of,
    without_team,
)

Entry = dict[str, Any]
# Shorter rows share the blocks of this length.
_SHORTEST = 256
_LENGTHS = tuple(1 << power for power in range(8, 16))
# Rows read by elements, up to so many, have second blocks where these gain so much over the first alone.
_LONGEST_MORE, _LEAST_MORE = 1024, 0.03


class RowsPart:
    """One item size's entry of `softmax.rows`.

    Args:
        item_bytes: of the input's dtype.
        is_aligned: whether rows are read in pieces.
        workloads: what it is tuned for; long rows, those read otherwise and those that lie across memory are left out.
        target: the device.
    """

    op = "softmax"

    def __init__(self, item_bytes: int, workloads: Iterable[Rows], target: Target, *, is_aligned: bool = True) -> None:
        self.name = f"softmax {item_bytes} bytes{'' if is_aligned else ' by elements'}"
        self._item_bytes = item_bytes
        self._is_aligned = is_aligned
        self._target = target
        self._workloads = [
            each
            for each in workloads
            if _is_like(each, item_bytes, is_aligned=is_aligned) and not is_long(each.problem, target)
        ]
        self._times: dict[int, dict[Rows, Times]] = defaultdict(dict)

    def measure(self, session: Session) -> None:
        """Compile candidates and race them on each workload."""
        fields = {workload: self._field(workload) for workload in self._workloads}
        fitting = session.survivors(
            Recipe(family_of(workload.problem), config, self._target)
            for workload, field in fields.items()
            for config in field
        )
        for number, (workload, field) in enumerate(fields.items(), start=1):
            if session.is_over():
                return
            able = [each for each in field if Recipe(family_of(workload.problem), each, self._target) in fitting]
            times = session.race(workload, able, must=[choose_by_table(workload.problem, self._target)])
            if times:
                self._times[length_of(workload)][workload] = times
            session.step("race", number, len(fields))

    def _field(self, workload: Rows) -> list[Config]:
        return [shortened(config, workload) for config in space.row_blocks(length_of(workload), self._target)]

    def select(self, banned: frozenset[Any]) -> list[Entry]:
        """The best blocks of each length, without `banned` configurations; what was chosen before where none is better."""
        if not self._times:
            return rows_of(self._target, self._item_bytes, is_aligned=self._is_aligned)
        first = [self._entry(block_n, banned) for block_n in _LENGTHS]
        more = [
            self._more(entry, banned) for entry in first if not self._is_aligned and entry["block_n"] <= _LONGEST_MORE
        ]
        return [*first, *filter(None, more)]

    def _more(self, first: Entry, banned: frozenset[Any]) -> Entry | None:
        """Blocks of the same length that are better than `first` for more rows or for fewer."""
        block_n = first["block_n"]
        measured = self._times[block_n]
        now = Config("row", first["block_rows"], block_n, first["num_warps"])

        def loss(config: Config) -> float:
            both = [
                [relative(times, shortened(each, workload)) for each in (now, config)]
                for workload, times in measured.items()
            ]
            return geomean([min(pair) for pair in both])

        best = min(self._able(block_n, banned), key=loss, default=now)
        if not measured or loss(best) > loss(now) * (1 - _LEAST_MORE):
            return None
        return _entry_of(best) | {"is_more": True}

    def _able(self, block_n: int, banned: frozenset[Any]) -> list[Config]:
        measured = self._times[block_n]
        return [
            config
            for config in space.row_blocks(block_n, self._target)
            if not any(shortened(config, workload) in banned for workload in measured)
        ]

    def _entry(self, block_n: int, banned: frozenset[Any]) -> Entry:
        dtype = next(name for name, size in ITEM_BYTES.items() if size == self._item_bytes)
        # Many rows, so that the longest are held whole too.
        now = choose_by_table(Problem(1 << 20, block_n, dtype, dtype, is_aligned=self._is_aligned), self._target)
        measured = self._times[block_n]

        def loss(config: Config) -> float:
            return geomean([relative(times, shortened(config, workload)) for workload, times in measured.items()])

        best = min(self._able(block_n, banned), key=loss, default=now) if measured else now
        if now not in banned and measured and loss(best) > loss(now) * (1 - LEAST_GAIN):
            best = now
        return _entry_of(best)

    def place(self, table: Entry, entries: list[Entry]) -> None:
        """Put `entries` into `table`."""
        if entries:
            key = entry_key(self._item_bytes, is_aligned=self._is_aligned)
            table.setdefault("softmax", {}).setdefault("rows", {})[key] = entries


class TeamPart:
    """One item size's entry of `softmax.team`.

    Args:
        item_bytes: of the input's dtype.
        is_aligned: whether rows are read in pieces.
        workloads: what it is tuned for; rows that one program holds, or that are read otherwise, are left out.
        target: the device.
    """

    op = "softmax"

    def __init__(self, item_bytes: int, workloads: Iterable[Rows], target: Target, *, is_aligned: bool = True) -> None:
        self.name = f"softmax {item_bytes} bytes{'' if is_aligned else ' by elements'}, long rows"
        self._item_bytes = item_bytes
        self._is_aligned = is_aligned
        self._target = target
        self._workloads = [
            each
            for each in workloads
            if _is_like(each, item_bytes, is_aligned=is_aligned) and is_long(each.problem, target)
        ]
        self._times: dict[Rows, Times] = {}

    def measure(self, session: Session) -> None:
        """Compile candidates and race them on each workload, beside reading rows twice."""
        fields = {workload: self._field(workload) for workload in self._workloads}
        fitting = session.survivors(
            Recipe(family_of(workload.problem), config, self._target)
            for workload, field in fields.items()
            for config in field
        )
        for number, (workload, field) in enumerate(fields.items(), start=1):
            if session.is_over():
                return
            able = [each for each in field if Recipe(family_of(workload.problem), each, self._target) in fitting]
            must = [choose_by_table(workload.problem, self._target), without_team(workload.problem, self._target)]
            times = session.race(workload, able, must=must)
            if times:
                self._times[workload] = times
            session.step("race", number, len(fields))

    def _field(self, workload: Rows) -> list[Config]:
        teams = (teamed(config, workload, self._target) for config in space.teams(workload.dtype, self._target))
        return [config for config in teams if config is not None]

    def select(self, banned: frozenset[Any]) -> list[Entry]:
        """The best team, if one is better than reading rows twice; the old one where nothing was measured."""
        old = team_of(self._target, self._item_bytes, is_aligned=self._is_aligned)
        if not self._times:
            return [old] if old else []
        dtype = self._workloads[0].dtype

        def loss(team: Config | None) -> float:
            return geomean([relative(times, self._would_take(each, team)) for each, times in self._times.items()])

        held = [old] if old else []
        now = [
            Config("team", 1, entry["block_n"], entry["num_warps"], programs_per_sm=entry["programs_per_sm"])
            for entry in held
        ]
        able = [config for config in (*now, *space.teams(dtype, self._target)) if config not in banned]
        best = min((None, *able), key=loss)
        if now and now[0] not in banned and loss(best) > loss(now[0]) * (1 - LEAST_GAIN):
            best = now[0]
        if best is None:
            return []
        names = ("block_n", "num_warps", "programs_per_sm")
        return [{name: getattr(best, name) for name in names}]

    def _would_take(self, workload: Rows, team: Config | None) -> Config:
        taken = teamed(team, workload, self._target) if team else None
        return taken or without_team(workload.problem, self._target)

    def place(self, table: Entry, entries: list[Entry]) -> None:
        """Put `entries` into `table`."""
        teams = table.setdefault("softmax", {}).setdefault("team", {})
        key = entry_key(self._item_bytes, is_aligned=self._is_aligned)
        teams.pop(key, None)
        wanted = entries[0] if entries else None
        if own_or_alike(teams, self._item_bytes, is_aligned=self._is_aligned) != wanted:
            teams[key] = wanted


def family_of(problem: Problem) -> Problem:
    """What of a problem its binaries depend on."""
    return replace(problem, rows=1, n=1)


def _entry_of(config: Config) -> Entry:
    return {"block_n": config.block_n, "block_rows": config.block_rows, "num_warps": config.num_warps}


def _is_like(workload: Rows, item_bytes: int, *, is_aligned: bool) -> bool:
    problem = workload.problem
    return problem.is_contiguous and problem.is_aligned == is_aligned and ITEM_BYTES[workload.dtype] == item_bytes


def length_of(workload: Rows) -> int:
    """The length of blocks that hold the rows of `workload`."""
    return max(_SHORTEST, power_of_two(workload.n))


def shortened(config: Config, workload: Rows) -> Config:
    """The blocks of `config` for rows that are shorter than the shortest entry."""
    block_n = min(config.block_n, power_of_two(workload.n))
    return replace(config, block_n=block_n, block_rows=config.block_rows * config.block_n // block_n)


def teamed(config: Config, workload: Rows, target: Target) -> Config | None:
    """The team of `config` for these rows; None where it has no room on the device."""
    team = -(-workload.n // config.block_n)
    has_room = team <= min(MAX_SPLITS, target.num_sms * config.programs_per_sm)
    return replace(config, splits=team) if has_room else None


assert _LENGTHS[-1] == LONGEST_ROW, "This is a bug."
