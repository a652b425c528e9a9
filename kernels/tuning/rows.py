"""Tuning softmax: blocks for rows held whole, by length, and the team for longer ones. Launches nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kernels.racing import Times
from kernels.softmax.configs import (
    ITEM_BYTES,
    LONGEST_ROW,
    MAX_SPLITS,
    Config,
    Problem,
    choose_by_table,
    is_long,
    power_of_two,
    without_team,
)
from kernels.tables import table_for
from kernels.targets import Target
from kernels.tuning import space
from kernels.tuning.compiling import Recipe
from kernels.tuning.selection import LEAST_GAIN, relative
from kernels.tuning.session import Session
from kernels.workloads import Rows, geomean

Entry = dict[str, Any]
# Shorter rows share the blocks of this length.
_SHORTEST = 256
_LENGTHS = tuple(1 << power for power in range(8, 16))


class RowsPart:
    """One item size's entry of `softmax.rows`.

    Args:
        item_bytes: of the input's dtype.
        workloads: what it is tuned for; long rows and those that lie across memory are left out.
        target: the device.
    """

    op = "softmax"

    def __init__(self, item_bytes: int, workloads: Iterable[Rows], target: Target) -> None:
        self.name = f"softmax {item_bytes} bytes"
        self._item_bytes = item_bytes
        self._target = target
        self._workloads = [
            each
            for each in workloads
            if ITEM_BYTES[each.dtype] == item_bytes and each.problem.is_contiguous and not is_long(each.problem, target)
        ]
        self._times: dict[int, dict[Rows, Times]] = defaultdict(dict)

    def measure(self, session: Session) -> None:
        """Compile candidates and race them on each workload."""
        fields = {workload: self._field(workload) for workload in self._workloads}
        fitting = session.survivors(
            Recipe(_family(workload.problem), config, self._target)
            for workload, field in fields.items()
            for config in field
        )
        for number, (workload, field) in enumerate(fields.items(), start=1):
            if session.is_over():
                return
            able = [each for each in field if Recipe(_family(workload.problem), each, self._target) in fitting]
            times = session.race(workload, able, must=[choose_by_table(workload.problem, self._target)])
            if times:
                self._times[_length(workload)][workload] = times
            session.step("race", number, len(fields))

    def _field(self, workload: Rows) -> list[Config]:
        return [_shortened(config, workload) for config in space.row_blocks(_length(workload), self._target)]

    def select(self, banned: frozenset[Any]) -> list[Entry]:
        """The best blocks of each length, without `banned` configurations; what was chosen before where none is better."""
        if not self._times:
            return list(_rows_of(self._target, self._item_bytes))
        return [self._entry(block_n, banned) for block_n in _LENGTHS]

    def _entry(self, block_n: int, banned: frozenset[Any]) -> Entry:
        dtype = next(name for name, size in ITEM_BYTES.items() if size == self._item_bytes)
        # Many rows, so that the longest are held whole too.
        now = choose_by_table(Problem(1 << 20, block_n, dtype, dtype), self._target)
        measured = self._times[block_n]

        def loss(config: Config) -> float:
            return geomean([relative(times, _shortened(config, workload)) for workload, times in measured.items()])

        able = [
            config
            for config in space.row_blocks(block_n, self._target)
            if not any(_shortened(config, workload) in banned for workload in measured)
        ]
        best = min(able, key=loss, default=now) if measured else now
        if now not in banned and measured and loss(best) > loss(now) * (1 - LEAST_GAIN):
            best = now
        return {"block_n": best.block_n, "block_rows": best.block_rows, "num_warps": best.num_warps}

    def place(self, table: Entry, entries: list[Entry]) -> None:
        """Put `entries` into `table`."""
        if entries:
            table.setdefault("softmax", {}).setdefault("rows", {})[str(self._item_bytes)] = entries


class TeamPart:
    """One item size's entry of `softmax.team`.

    Args:
        item_bytes: of the input's dtype.
        workloads: what it is tuned for; rows that one program holds are left out.
        target: the device.
    """

    op = "softmax"

    def __init__(self, item_bytes: int, workloads: Iterable[Rows], target: Target) -> None:
        self.name = f"softmax {item_bytes} bytes, long rows"
        self._item_bytes = item_bytes
        self._target = target
        self._workloads = [
            each
            for each in workloads
            if ITEM_BYTES[each.dtype] == item_bytes and each.problem.is_contiguous and is_long(each.problem, target)
        ]
        self._times: dict[Rows, Times] = {}

    def measure(self, session: Session) -> None:
        """Compile candidates and race them on each workload, beside reading rows twice."""
        fields = {workload: self._field(workload) for workload in self._workloads}
        fitting = session.survivors(
            Recipe(_family(workload.problem), config, self._target)
            for workload, field in fields.items()
            for config in field
        )
        for number, (workload, field) in enumerate(fields.items(), start=1):
            if session.is_over():
                return
            able = [each for each in field if Recipe(_family(workload.problem), each, self._target) in fitting]
            must = [choose_by_table(workload.problem, self._target), without_team(workload.problem, self._target)]
            times = session.race(workload, able, must=must)
            if times:
                self._times[workload] = times
            session.step("race", number, len(fields))

    def _field(self, workload: Rows) -> list[Config]:
        teams = (_teamed(config, workload, self._target) for config in space.teams(workload.dtype, self._target))
        return [config for config in teams if config is not None]

    def select(self, banned: frozenset[Any]) -> list[Entry]:
        """The best team, if one is better than reading rows twice; the old one where nothing was measured."""
        old = table_for(self._target).get("softmax", {}).get("team", {}).get(str(self._item_bytes))
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
        taken = _teamed(team, workload, self._target) if team else None
        return taken or without_team(workload.problem, self._target)

    def place(self, table: Entry, entries: list[Entry]) -> None:
        """Put `entries` into `table`."""
        teams = table.setdefault("softmax", {}).setdefault("team", {})
        teams.pop(str(self._item_bytes), None)
        if entries:
            teams[str(self._item_bytes)] = entries[0]


def _family(problem: Problem) -> Problem:
    """What of a problem its binaries depend on."""
    return replace(problem, rows=1, n=1)


def _rows_of(target: Target, item_bytes: int) -> list[Entry]:
    found: list[Entry] = table_for(target).get("softmax", {}).get("rows", {}).get(str(item_bytes), [])
    return found


def _length(workload: Rows) -> int:
    return max(_SHORTEST, power_of_two(workload.n))


def _shortened(config: Config, workload: Rows) -> Config:
    """The blocks of `config` for rows that are shorter than the shortest entry."""
    block_n = min(config.block_n, power_of_two(workload.n))
    return replace(config, block_n=block_n, block_rows=config.block_rows * config.block_n // block_n)


def _teamed(config: Config, workload: Rows, target: Target) -> Config | None:
    team = -(-workload.n // config.block_n)
    has_room = team <= min(MAX_SPLITS, target.num_sms * config.programs_per_sm)
    return replace(config, splits=team) if has_room else None


assert _LENGTHS[-1] == LONGEST_ROW, "This is a bug."
