"""Choosing among measured configurations: a model of time, and rules. Pure: no torch, no Triton.

For tall products every configuration of the table is a candidate, at every split of K; the model predicts the time of
each from what its tiles and steps were measured to cost, and the fastest wins. Products of few rows are limited by
reading `b` and take the table's rule for them. All only give members of a
finite set, `members.members`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewire.kernels.matmul.configs import (
    Config,
    Problem,
    cdiv,
    choose_fma,
    choose_matrix,
    for_amd,
    is_read_in_pieces,
    split_k_for,
)
from tilewire.kernels.matmul.members import (
    FEW_ROWS,
    INTERPRETED,
    INTERPRETED_TMA,
    SPLITS,
    arithmetic_of,
    can_split,
    family_of,
    has_descriptors,
    is_main,
    is_offered,
    is_scalar,
    stores_boxes,
)
from tilewire.kernels.matmul.table import Candidate, Rule, are_for_all, candidates_of, rules_of
from tilewire.kernels.matmul.timing import by_time
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import table_for


def choose(problem: Problem, target: Target, *, is_plain: bool = True) -> Config:
    """The configuration for `problem` on `target`: with its family, a member of `members(target)`.

    Args:
        problem: the product.
        target: the device.
        is_plain: whether nothing follows the product.
    """
    if target.backend == "interpreter":
        is_boxed = stores_boxes(problem, INTERPRETED_TMA)
        split_k = 2 if problem.k > 64 and not is_boxed else 1
        has_boxes = problem.is_padded_in and problem.is_aligned_out
        return replace(INTERPRETED_TMA if has_boxes else INTERPRETED, split_k=split_k)
    chosen = by_time(problem, target, is_plain=is_plain)
    return chosen or choose_by_table(problem, target, is_plain=is_plain)


def choose_by_table(problem: Problem, target: Target, *, is_plain: bool) -> Config:
    """The configuration that the table's tiles and rules give, and built-in buckets where it has none.

    What is chosen without fitted costs, and what those are tuned against.
    """
    measured = choose_measured(problem, target, is_plain=is_plain)
    if measured is not None:
        return measured
    config = (choose_fma if is_scalar(problem.dtype, problem.precision, target) else choose_matrix)(problem)
    config = replace(config, split_k=split_k_for(problem, config, target))
    return for_amd(config) if target.backend == "hip" else config


def choose_invariant(problem: Problem, target: Target) -> Config:
    """A configuration that depends neither on the rows nor on the number of products, and does not split K.

    A row's sums then are the same, bit for bit, whatever it is computed with. Also a member of `members(target)`.

    Args:
        problem: the product.
        target: the device.
    """
    shown = replace(problem, m=4 * FEW_ROWS, batch=1)
    if target.backend == "interpreter":
        return replace(choose(shown, target), split_k=1)
    if problem.is_padded_in and has_descriptors(problem, target):
        # Those that are built for every store, since that does depend on the rows.
        candidates = candidates_of(target).get(arithmetic_of(problem), ())
        every = [each for each in candidates if each.is_wide and not each.config.is_persistent]
        if every:
            return min(every, key=lambda each: predicted_us(shown, each, 1, target)).config
    rules = rules_of(target).get(arithmetic_of(problem), ())
    if are_for_all(rules) and is_read_in_pieces(problem):
        # The last rule asks for nothing, and is the only one that every product could take.
        return rules[-1].config
    config = (choose_fma if is_scalar(problem.dtype, problem.precision, target) else choose_matrix)(shown)
    return for_amd(config) if target.backend == "hip" else config


def choose_measured(problem: Problem, target: Target, *, is_plain: bool) -> Config | None:
    """The best measured configuration; None where none was measured that can run."""
    arithmetic = arithmetic_of(problem)
    rules = rules_of(target).get(arithmetic, ())
    is_ruled = bool(rules) and problem.m <= rules[-1].max_m
    if is_ruled and rules[-1].config.kernel == "pointer":
        is_for_this = is_read_in_pieces(problem) and (is_main(problem) or are_for_all(rules))
        return by_rule(problem, rules, target) if is_for_this else None
    if not (problem.is_padded_in and has_descriptors(problem, target)):
        return None
    if is_ruled and is_main(problem):
        return by_rule(problem, rules, target)
    best = by_model(problem, candidates_of(target).get(arithmetic, ()), target, is_plain=is_plain)
    return best and replace(best[0].config, split_k=best[1])


def by_model(
    problem: Problem, candidates: Sequence[Candidate], target: Target, *, is_plain: bool
) -> tuple[Candidate, int] | None:
    """The candidate, and the split of K, with the least predicted time; None when no candidate has a binary for it."""
    for_main = is_main(problem)
    choices = [
        (each, split)
        for each in candidates
        for split in SPLITS
        if _is_sensible(problem, each, split, target)
        and is_offered(each, _store(problem, each, split), for_main=for_main, is_plain=is_plain)
    ]
    if not choices:
        return None
    return min(choices, key=lambda choice: predicted_us(problem, choice[0], choice[1], target))


def _store(problem: Problem, candidate: Candidate, split_k: int) -> str:
    return family_of(problem, replace(candidate.config, split_k=split_k), is_plain=False).store


def predicted_us(problem: Problem, candidate: Candidate, split_k: int, target: Target) -> float:
    """The model: waves of programs, each a tile's cost and its steps'; at least the time of reading and writing."""
    costs = table_for(target)["model"]
    config = candidate.config
    steps = cdiv(cdiv(problem.k, config.block_k), split_k)
    full = candidate.tile_us[1] + steps * candidate.step_us[1]
    alone = candidate.tile_us[0] + steps * candidate.step_us[0]
    waves, rest = divmod(config.tiles(problem) * split_k, target.num_sms * candidate.programs_per_sm)
    last = 0.0 if rest == 0 else alone if rest <= target.num_sms else full
    bytes_us = problem.min_bytes / (costs["bandwidth_gbs"] * 1e3)
    reduce_us = 0.0
    if split_k > 1:
        # The last program of a tile reads all parts; the more warps it has, the more it has in flight.
        parts_bytes = split_k * config.block_m * config.block_n * 4
        reduce_us = float(costs["reduce_us"] + parts_bytes / (costs["reduce_gbs_per_warp"] * config.num_warps * 1e3))
    return float(max(waves * full + last, bytes_us) + reduce_us)


def _is_sensible(problem: Problem, candidate: Candidate, split_k: int, target: Target) -> bool:
    if split_k == 1:
        return True
    config = candidate.config
    # Parts that wait for a second wave cost more than the idle multiprocessors that they would use.
    too_many = config.tiles(problem) * split_k > target.num_sms * candidate.programs_per_sm
    return can_split(config) and not too_many and cdiv(problem.k, config.block_k) >= 2 * split_k


def by_rule(problem: Problem, rules: Sequence[Rule], target: Target) -> Config:
    """The first rule for so few rows whose tiles are enough, split until they occupy the device."""
    closest = min(rule.max_m for rule in rules if problem.m <= rule.max_m)
    fitting = [rule for rule in rules if rule.max_m == closest]
    config = next(rule.config for rule in fitting if rule.config.tiles(problem) >= rule.min_tiles)
    return split_to_fill(problem, config, target)


def split_to_fill(problem: Problem, config: Config, target: Target) -> Config:
    """`config` with the fewest splits of K that occupy the device."""
    steps = cdiv(problem.k, config.block_k)
    wanted = (target.num_sms * 7 // 8) / config.tiles(problem)
    possible = [split for split in SPLITS if split == 1 or (steps >= 2 * split and can_split(config))]
    split_k = next((split for split in possible if split >= wanted), possible[-1])
    return replace(config, split_k=split_k)
