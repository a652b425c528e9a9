"""Tuning add: blocks of a flat addition by its size. Launches nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tilewire.kernels.add.configs import ITEM_BYTES, Config, choose
from tilewire.kernels.autotune import space
from tilewire.kernels.autotune.compiling import Recipe
from tilewire.kernels.autotune.racing import Times
from tilewire.kernels.autotune.selection import LEAST_GAIN, relative
from tilewire.kernels.autotune.session import Session
from tilewire.kernels.autotune.workloads import Sum, geomean
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import table_for

Entry = dict[str, Any]
_MOST_ENTRIES = 3
_Shape = tuple[int, int]


class AddPart:
    """The entries of `add`: by number of elements, warps of a program and 16-byte pieces of each operand for a thread.

    Args:
        workloads: what it is tuned for; those of more than one row are left out.
        target: the device.
    """

    op = "add"
    name = "add"

    def __init__(self, workloads: Iterable[Sum], target: Target) -> None:
        self._target = target
        self._workloads = [each for each in workloads if each.problem.family.outer_rank == 0]
        self._times: dict[Sum, Times] = {}
        self._shapes: list[_Shape] = [(config.num_warps, vectors) for config, vectors in space.flat_blocks(4, target)]

    def measure(self, session: Session) -> None:
        """Compile candidates and race them on each workload."""
        wanted = [(each, self._config(shape, each)) for each in self._workloads for shape in self._shapes]
        fitting = session.survivors(Recipe(each.problem.family, config, self._target) for each, config in wanted)
        for number, workload in enumerate(self._workloads, start=1):
            if session.is_over():
                return
            field = [config for each, config in wanted if each == workload]
            able = [config for config in field if Recipe(workload.problem.family, config, self._target) in fitting]
            times = session.race(workload, able, must=[choose(workload.problem, self._target)])
            if times:
                self._times[workload] = times
            session.step("race", number, len(self._workloads))

    def _config(self, shape: _Shape, workload: Sum) -> Config:
        blocks = space.flat_blocks(ITEM_BYTES[workload.dtype], self._target)
        return next(config for config, vectors in blocks if (config.num_warps, vectors) == shape)

    def select(self, banned: frozenset[Any]) -> list[Entry]:
        """Up to three ranges of sizes that lose the least, without `banned` configurations; the old ones if no better."""
        old: list[Entry] = table_for(self._target).get("add", [])
        sizes: dict[int, list[Sum]] = defaultdict(list)
        for workload in self._times:
            sizes[workload.problem.n].append(workload)
        if len(sizes) < _MOST_ENTRIES:
            return old
        shapes = [
            shape for shape in self._shapes if not any(self._config(shape, each) in banned for each in self._times)
        ]
        ordered = sorted(sizes)
        best, least = self._best(ordered, sizes, shapes)
        now = geomean([relative(times, choose(each.problem, self._target)) for each, times in self._times.items()])
        if old and not banned and least > now * (1 - LEAST_GAIN):
            return old
        return best

    def _best(self, ordered: list[int], sizes: dict[int, list[Sum]], shapes: list[_Shape]) -> tuple[list[Entry], float]:
        """Every way to cut the sizes into ranges; the entries of the best, and its loss."""
        best: list[Entry] = []
        least = float("inf")
        for cuts in itertools.combinations(range(1, len(ordered)), _MOST_ENTRIES - 1):
            bounds = (0, *cuts, len(ordered))
            ranges = [ordered[first:last] for first, last in itertools.pairwise(bounds)]
            fitted = [self._fit([each for size in within for each in sizes[size]], shapes) for within in ranges]
            loss = geomean([each for losses, _ in fitted for each in losses])
            if loss < least:
                # A range ends midway, on a scale of powers, to the first size of the next.
                ends = [_between(ordered[cut - 1], ordered[cut]) for cut in cuts]
                best = [
                    {"max_n": end, "num_warps": num_warps, "vectors": vectors}
                    for end, (_, (num_warps, vectors)) in zip((*ends, None), fitted, strict=True)
                ]
                least = loss
        return best, least

    def _fit(self, workloads: list[Sum], shapes: list[_Shape]) -> tuple[list[float], _Shape]:
        """The losses under the best blocks for `workloads`, and those blocks."""

        def losses(shape: _Shape) -> list[float]:
            return [relative(self._times[each], self._config(shape, each)) for each in workloads]

        best = min(shapes, key=lambda shape: geomean(losses(shape)))
        return losses(best), best

    def place(self, table: Entry, entries: list[Entry]) -> None:
        """Put `entries` into `table`."""
        if entries:
            table["add"] = entries


def _between(low: int, high: int) -> int:
    return max(low, 1 << (low.bit_length() + high.bit_length() - 2) // 2)
