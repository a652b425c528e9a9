"""Everything that tuning knows to try for one shape alone, whether the catalogue has a binary of it or not. Launches nothing.

Compiling all of it takes minutes for a shape of a new layout, so nothing but a benchmark does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewire.kernels.add.configs import ITEM_BYTES
from tilewire.kernels.autotune import rows, space
from tilewire.kernels.autotune.compiling import Facts, Outcome, Recipe
from tilewire.kernels.autotune.session import Compiles
from tilewire.kernels.autotune.workloads import Config, Product, Rows, Sum, Workload
from tilewire.kernels.matmul.members import SPLITS, arithmetic_of, family_of, has_descriptors, is_sensible
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import is_long


class Everything:
    """All candidates of one shape after the other, compiled as they are asked for.

    Args:
        target: the device.
        compiler: what compiles; a layout that was seen is not compiled again.
    """

    def __init__(self, target: Target, compiler: Compiles) -> None:
        self._target = target
        self._compiler = compiler
        self._is_able: dict[Recipe, bool] = {}

    @property
    def num_compiled(self) -> int:
        """Candidates that were compiled, with one split each."""
        return len(self._is_able)

    def candidates(self, workload: Workload) -> list[Config]:
        """What compiles for `workload`, fits the device and spills no registers; products at every sensible split of K."""
        found = dict(candidates(workload, self._target))
        missing = [recipe for recipe in dict.fromkeys(found.values()) if recipe not in self._is_able]
        self._compiler.compile(missing, self._keep, lambda: False)
        return [config for config, recipe in found.items() if self._is_able.get(recipe)]

    def _keep(self, recipe: Recipe, outcome: Outcome) -> None:
        self._is_able[recipe] = isinstance(outcome, Facts) and not outcome.objection(self._target)


def candidates(workload: Workload, target: Target) -> Iterator[tuple[Config, Recipe]]:
    """Every configuration of the search space for `workload`, with what names its binary."""
    if isinstance(workload, Product):
        return _of_product(workload, target)
    if isinstance(workload, Rows):
        return _of_rows(workload, target)
    return _of_sum(workload, target)


def _of_product(workload: Product, target: Target) -> Iterator[tuple[Config, Recipe]]:
    problem = workload.problem
    arithmetic = arithmetic_of(problem)
    blocks = [config for most in space.POINTER_BUCKETS for config in space.pointer(arithmetic, most, target)]
    if has_descriptors(problem, target):
        blocks += space.tall(arithmetic, target)
        blocks += [config for most in space.BUCKETS for config in space.few_rows(arithmetic, most, target)]
    for config in dict.fromkeys(blocks):
        for split_k in SPLITS:
            whole = replace(config, split_k=split_k)
            if is_sensible(problem, whole, target):
                yield whole, Recipe(family_of(problem, whole, is_plain=workload.is_plain), config, target)


def _of_rows(workload: Rows, target: Target) -> Iterator[tuple[Config, Recipe]]:
    problem = workload.problem
    if not problem.is_contiguous:
        return
    family = rows.family_of(problem)
    if is_long(problem, target):
        teams = (rows.teamed(config, workload, target) for config in space.teams(workload.dtype, target))
        yield from ((config, Recipe(family, config, target)) for config in teams if config is not None)
        return
    for config in space.row_blocks(rows.length_of(workload), target):
        whole = rows.shortened(config, workload)
        yield whole, Recipe(family, whole, target)


def _of_sum(workload: Sum, target: Target) -> Iterator[tuple[Config, Recipe]]:
    family = workload.problem.family
    if family.outer_rank == 0:
        blocks = space.flat_blocks(ITEM_BYTES[workload.dtype], target)
        yield from ((config, Recipe(family, config, target)) for config, _ in blocks)
