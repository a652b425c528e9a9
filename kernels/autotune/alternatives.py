"""Every way in which the binaries of a target can compute one problem, and the one that dispatch takes. Pure.

No torch, no Triton, no device. Measuring all ways says what dispatch's choice costs. They are members of the catalogue,
with any number of programs for each tile or row that the kernels allow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from tilewire.kernels.add.configs import choose as choose_add
from tilewire.kernels.add.configs import configs_for as add_configs
from tilewire.kernels.autotune.workloads import Config as AnyConfig
from tilewire.kernels.autotune.workloads import Product, Rows, Workload
from tilewire.kernels.matmul.choice import choose as choose_product
from tilewire.kernels.matmul.configs import Config, Problem
from tilewire.kernels.matmul.members import SPLITS, is_possible, members
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.choice import choose as choose_softmax
from tilewire.kernels.softmax.choice import possible


def chosen(workload: Workload, target: Target) -> AnyConfig:
    """What dispatch gives `workload` on `target`."""
    if isinstance(workload, Product):
        return choose_product(workload.problem, target, is_plain=workload.is_plain)
    if isinstance(workload, Rows):
        return choose_softmax(workload.problem, target)
    return choose_add(workload.problem, target)


def alternatives(workload: Workload, target: Target) -> list[AnyConfig]:
    """Every configuration of the catalogue that can compute `workload`, dispatch's own first."""
    own = chosen(workload, target)
    if isinstance(workload, Product):
        return list(dict.fromkeys((own, *of_product(workload.problem, target, is_plain=workload.is_plain))))
    if isinstance(workload, Rows):
        return list(dict.fromkeys((own, *possible(workload.problem, target))))
    return list(dict.fromkeys((own, *add_configs(workload.problem.family, target))))


def of_product(problem: Problem, target: Target, *, is_plain: bool) -> Iterator[Config]:
    """Every member of the catalogue that can compute `problem`, at every sensible split of K."""
    for config in _configs_of(target):
        for split_k in SPLITS:
            whole = replace(config, split_k=split_k)
            if is_possible(problem, whole, target, is_plain=is_plain):
                yield whole


@functools.cache
def _configs_of(target: Target) -> tuple[Config, ...]:
    return tuple(dict.fromkeys(config for _, config in members(target)))
