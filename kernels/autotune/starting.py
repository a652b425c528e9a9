"""Tuning at start, for devices without a table: the best members of the catalogue for common sizes. Compiles nothing.

What is found are picks: `kernels.selection.picks` keeps them on disk, `kernels.selection.tables.install_picks` has
dispatch consult them. Runs where kernels may be launched, on the current device, before requests are.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from tilewire.kernels.autotune.alternatives import alternatives, chosen
from tilewire.kernels.autotune.benches import GpuBench
from tilewire.kernels.autotune.defaults import defaults
from tilewire.kernels.autotune.provenance import driver_version
from tilewire.kernels.autotune.racing import Bench, Heats, race
from tilewire.kernels.autotune.workloads import Config, Product, Rows, Workload, geomean
from tilewire.kernels.build.precompile import fingerprint
from tilewire.kernels.matmul.choice import bucket_of as bucket_of_product
from tilewire.kernels.matmul.configs import Config as MatmulConfig
from tilewire.kernels.matmul.members import is_main, is_supported
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.picks import Picks, read_picks, write_picks
from tilewire.kernels.selection.tables import install_picks, is_tuned
from tilewire.kernels.softmax.choice import bucket_of as bucket_of_rows
from tilewire.kernels.softmax.configs import Config as SoftmaxConfig
from tilewire.kernels.softmax.configs import is_long

_logger = logging.getLogger(__name__)
_HEATS = Heats(rounds=3, finalists=4, final_rounds=7)
# What gains less is left to dispatch, which may know the sizes between better.
_LEAST_GAIN = 1.03
_SHORTEST = 16


def pick_at_start(
    target: Target,
    folder: Path,
    budget_s: float,
    on_progress: Callable[[int, int], None],
    *,
    bench: Bench | None = None,
) -> Picks:
    """Have dispatch use the picks that `folder` keeps, completed by measuring for at most `budget_s`.

    To be called once, on the current device, when the catalogue is loaded and before requests come. Does nothing for a
    device that has a table of its own. What is measured is freed again but for PyTorch's cache.

    Args:
        target: of the current device.
        folder: where picks are kept.
        budget_s: seconds; 0 only reads.
        on_progress: called with (done, total) buckets. What it raises ends the tuning.
        bench: what times; the current GPU by default.

    Returns:
        The picks that were installed.
    """
    if is_tuned(target):
        return {}
    kept = load_picks(target, folder)
    picks = tune_at_start(target, budget_s, on_progress, known=kept, bench=bench) if budget_s > 0 else kept
    if picks != kept:
        save_picks(picks, target, folder)
    install_picks(target, picks)
    return picks


def load_picks(target: Target, folder: Path) -> Picks:
    """The picks that were kept in `folder` for the current device, its driver, this Triton and these kernels.

    None of them when there is no such file; one that is broken or foreign is ignored with a warning.
    """
    return read_picks(target, folder, identity_of(target))


def save_picks(picks: Picks, target: Target, folder: Path) -> None:
    """Keep `picks` in `folder` for the next start; a folder that cannot be written to costs a warning."""
    write_picks(picks, target, folder, identity_of(target))


def identity_of(target: Target) -> dict[str, str]:
    """What picks for the current device depend on."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else target.name
    return {
        "device": name,
        "driver": driver_version(),
        "triton": triton.__version__,
        "kernels": fingerprint(target),
    }


def tune_at_start(
    target: Target,
    budget_s: float,
    on_progress: Callable[[int, int], None],
    *,
    known: Mapping[str, dict[str, Any] | None] | None = None,
    bench: Bench | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Picks:
    """Measure, for each bucket of common sizes, which member of the catalogue is best, until the budget is spent.

    Nothing is compiled that the catalogue does not name, and nothing is installed: see
    `kernels.selection.tables.install_picks`.

    Args:
        target: of the current device.
        budget_s: seconds; the most valuable buckets come first.
        on_progress: called with (done, total) buckets. What it raises ends the tuning.
        known: picks of an earlier start, which are not measured again.
        bench: what times; the current GPU by default.
        clock: seconds.

    Returns:
        `known` and what was found.
    """
    picks: Picks = dict(known or {})
    bench = bench or GpuBench()
    end_s = clock() + budget_s
    buckets = {bucket: pair for bucket, pair in warmup_buckets(target).items() if bucket not in picks}
    for number, (bucket, workloads) in enumerate(buckets.items()):
        if clock() >= end_s:
            break
        on_progress(number, len(buckets))
        try:
            picks[bucket] = _best(workloads, target, bench)
        except torch.OutOfMemoryError:
            _logger.warning("no room on the device to tune for %s", bucket)
            torch.cuda.empty_cache()
    on_progress(len(buckets), len(buckets))
    return picks


def warmup_buckets(target: Target) -> dict[str, tuple[Workload, ...]]:
    """Buckets of common sizes, each with workloads that stand for it: its greatest, and one of three quarters."""
    found: dict[str, tuple[Workload, ...]] = {}
    for workload in defaults():
        bucket = _bucket(workload, target)
        if bucket is not None and bucket not in found:
            found[bucket] = tuple(dict.fromkeys((_sized(workload, 1.0), _sized(workload, 0.75))))
    return found


def _bucket(workload: Workload, target: Target) -> str | None:
    """What a pick for `workload` is kept by; None where dispatch consults no picks, or has nothing to choose from."""
    if isinstance(workload, Product):
        problem = workload.problem
        is_common = is_main(problem) and workload.is_plain and is_supported(workload.dtype, target)
        return bucket_of_product(problem) if is_common else None
    if isinstance(workload, Rows) and is_long(_sized(workload, 0.75).problem, target):
        return bucket_of_rows(workload.problem)
    return None


def _sized(workload: Any, share: float) -> Any:
    """`workload` with each size the greatest of its bucket, or `share` of it."""
    names = ("m", "n", "k") if isinstance(workload, Product) else ("n",)

    def sized(size: int) -> int:
        most = max(_SHORTEST, 1 << (size - 1).bit_length())
        # In whole pieces of 16 bytes, whatever the dtype; a share of half or less would be another bucket's.
        return max(_SHORTEST, -(-round(most * share) // _SHORTEST) * _SHORTEST)

    return dataclasses.replace(workload, **{name: sized(getattr(workload, name)) for name in names})


def _best(workloads: Sequence[Workload], target: Target, bench: Bench) -> dict[str, Any] | None:
    """The entry of the configuration that is best over `workloads`; None where dispatch's own is as good."""
    own = [chosen(workload, target) for workload in workloads]
    times = [
        race(bench, workload, alternatives(workload, target), must=[now], heats=_HEATS)
        for workload, now in zip(workloads, own, strict=True)
    ]
    entries = [{_entry_key(config): us for config, us in each.items()} for each in times]
    if not all(now in each for now, each in zip(own, times, strict=True)):
        return None
    now_us = geomean([each[now] for now, each in zip(own, times, strict=True)])
    shared = [key for key in entries[0] if key is not None and all(key in each for each in entries)]
    means = {key: geomean([each[key] for each in entries]) for key in shared}
    best = min(means, key=means.__getitem__, default=None)
    return dict(best) if best is not None and means[best] * _LEAST_GAIN <= now_us else None


def _entry_key(config: Config) -> tuple[tuple[str, Any], ...] | None:
    """What a pick says of `config`, in a form to compare; None for what cannot be picked."""
    if isinstance(config, MatmulConfig):
        return tuple(sorted(dataclasses.asdict(config).items()))
    if isinstance(config, SoftmaxConfig) and config.kernel in ("loop", "split"):
        return (("splits", config.splits),)
    return None
