"""`tilewire tune`: measures this machine's GPU and writes its table. Owns the order of things, the files and the budget.

Runs in a process of its own, on the thread that calls it; candidates are compiled in further processes.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton

from tilewire import kernels
from tilewire.kernels.autotune.alternatives import chosen
from tilewire.kernels.autotune.benches import GpuBench
from tilewire.kernels.autotune.compiling import Compiler
from tilewire.kernels.autotune.defaults import defaults
from tilewire.kernels.autotune.journal import Journal
from tilewire.kernels.autotune.provenance import Device, as_text, driver_version, identity
from tilewire.kernels.autotune.racing import Bench
from tilewire.kernels.autotune.relearning import newly_learned, relearn
from tilewire.kernels.autotune.rows import RowsPart, TeamPart
from tilewire.kernels.autotune.rules import RulesPart
from tilewire.kernels.autotune.session import Compiles, Session, Step
from tilewire.kernels.autotune.settling import Part, Summary, Table, compare, measure_all, settle, summarise
from tilewire.kernels.autotune.sums import AddPart
from tilewire.kernels.autotune.tiles import MOST_ENTRIES, RULED, TilesPart
from tilewire.kernels.autotune.workloads import Product, Rows, Sum, Workload
from tilewire.kernels.matmul.configs import resolve_precision
from tilewire.kernels.matmul.members import is_supported
from tilewire.kernels.runtime.targets import Target, current
from tilewire.kernels.selection.catalogue import variants
from tilewire.kernels.selection.tables import table_for, write_atomically

OPS = ("matmul", "softmax", "add")
# Shares of the budget; 16-bit products are what most requests ask for.
_WEIGHTS = {
    "half": 6.0,
    "softmax": 2.5,
    "add": 1.0,
    "tf32": 2.0,
    "int8": 2.0,
    "float8": 2.0,
    "ieee": 1.5,
    "tf32x3": 1.0,
}
# Of the budget, for comparing the choices before and after.
_COMPARE_SHARE = 0.15
# Of the budget, for racing the random workloads that costs are learned from.
_LEARN_SHARE = 0.35
# What a copy reaches of the bandwidth is more than a product's operands do.
_READ_SHARE = 0.96
_STREAM = Sum(1, 1 << 27, "bfloat16")


class TuneError(Exception):
    """Tuning cannot begin, or gave nothing; the message says why."""


@dataclass(frozen=True)
class Options:
    """What to tune.

    Attributes:
        ops: of `OPS`.
        budget_s: seconds for compiling and measuring candidates; checking what was chosen comes on top.
        workloads: instead of the usual ones, the most valuable first.
        out: the table to write; by default the device's own, beside the others in the package.
        restart: forget what an interrupted tuning measured.
        command: for the table's provenance.
        num_learned: random workloads that costs are learned from; 0 for none.
    """

    ops: tuple[str, ...] = OPS
    budget_s: float = 600.0
    workloads: tuple[Workload, ...] = ()
    out: Path | None = None
    restart: bool = False
    command: str = ""
    num_learned: int = 2400


@dataclass(frozen=True)
class Tuned:
    """What a tuning did.

    Attributes:
        path: the table.
        summaries: by op.
        discarded: (candidate, why) of those that do not compile, do not fit or spill.
        was_cut_short: whether the budget ended before the candidates did.
        num_variants: binaries of the catalogue: before, after.
        learned: by kind of request whose costs are new: of how many `workloads` that they were not fitted to, how many times
            the fastest's time their choices take (`geomean`), those `by_table` alone, and the share `within_10_percent`.
    """

    path: Path
    summaries: list[Summary]
    discarded: list[tuple[str, str]]
    was_cut_short: bool
    num_variants: tuple[int, int]
    learned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def tune(device_index: int, options: Options, on_step: Callable[[Step], None]) -> Tuned:
    """Measure candidates on a GPU and write its table.

    Raises:
        TuneError: there is no such GPU, the table cannot be written, or nothing could be measured.
    """
    if not torch.cuda.is_available() or device_index >= torch.cuda.device_count():
        raise TuneError(f"there is no GPU {device_index} that torch can use")
    torch.cuda.set_device(device_index)
    device = Device(current(device_index), torch.cuda.get_device_name(device_index), driver_version())
    with Compiler() as compiler:
        return tune_with(device, options, GpuBench(), compiler, on_step)


def tune_with(
    device: Device, options: Options, bench: Bench, compiler: Compiles, on_step: Callable[[Step], None]
) -> Tuned:
    """As `tune`, with whatever measures and compiles.

    Raises:
        TuneError: the table cannot be written, or nothing could be measured.
    """
    target = device.target
    path = options.out or Path(kernels.__file__).parent / "selection" / "tuned" / f"{target.name}.json"
    if not os.access(path.parent, os.W_OK):
        raise TuneError(f"{path.parent} is no folder that can be written to: name the table with --out")
    journal = Journal(path.with_suffix(".journal.jsonl"), identity(device))
    if options.restart:
        journal.remove()
    session = Session(target, bench, compiler, journal, time.monotonic, on_step)
    workloads = [each for each in options.workloads or defaults() if each.op in options.ops]
    parts, weights = parts_of(workloads, target)
    if not parts:
        raise TuneError("none of the shapes is of an op that is tuned")
    measure_all(session, parts, weights, options.budget_s * (1 - _COMPARE_SHARE - _LEARN_SHARE), time.monotonic)
    table, trial = settle(session, parts)
    session.begin("costs", time.monotonic() + options.budget_s * _LEARN_SHARE)
    table, trial = relearn(session, table, trial, options.ops, options.num_learned)
    session.begin("compare", time.monotonic() + options.budget_s * _COMPARE_SHARE)
    gains = compare(session, workloads, trial)
    summaries = summarise(gains)
    if not gains:
        raise TuneError("the budget was spent before anything was measured")
    _describe(table, session, device, options, summaries)
    write_atomically(path, as_text(table))
    if not session.was_cut_short:
        journal.remove()
    num_variants = len(variants(target)), len(variants(trial))
    return Tuned(
        path, summaries, session.discarded, session.was_cut_short, num_variants, newly_learned(table, table_for(target))
    )


def parts_of(workloads: Sequence[Workload], target: Target) -> tuple[list[Part], list[float]]:
    """The parts of a table that `workloads` tune, and their shares of the budget; 16-bit products first."""
    products = [each for each in workloads if isinstance(each, Product)]
    rows = [each for each in workloads if isinstance(each, Rows)]
    sums = [each for each in workloads if isinstance(each, Sum)]
    named: list[tuple[str, Part]] = []
    first, *others = (name for name in _WEIGHTS if name not in ("softmax", "add") and _can(name, target))
    named += _product_parts(first, products, target)
    if rows:
        for item_bytes, is_aligned in itertools.product((4, 2), (True, False)):
            named += [
                ("softmax", kind(item_bytes, rows, target, is_aligned=is_aligned)) for kind in (RowsPart, TeamPart)
            ]
    if sums:
        named.append(("add", AddPart(sums, target)))
    for arithmetic in others:
        named += _product_parts(arithmetic, products, target)
    shares = {name: _WEIGHTS[name] / [each for each, _ in named].count(name) for name, _ in named}
    return [part for _, part in named], [shares[name] for name, _ in named]


def _can(arithmetic: str, target: Target) -> bool:
    """Whether `target` multiplies so by itself, and not in another arithmetic's stead."""
    if arithmetic == "float8":
        return is_supported("float8_e4m3fn", target)
    return arithmetic in ("half", "int8") or resolve_precision(arithmetic, target) == arithmetic


def _product_parts(arithmetic: str, products: list[Product], target: Target) -> list[tuple[str, Part]]:
    if not products:
        return []
    if not target.has_tma or arithmetic not in MOST_ENTRIES:
        return [(arithmetic, RulesPart(arithmetic, "pointer", products, target))]
    rules: list[Part] = [RulesPart(arithmetic, "tma", products, target)] if arithmetic in RULED else []
    return [(arithmetic, part) for part in (TilesPart(arithmetic, products, target), *rules)]


def _describe(table: Table, session: Session, device: Device, options: Options, summaries: list[Summary]) -> None:
    """Say in `table` where it comes from."""
    if session.target.has_tma and table.get("device") != device.name:
        # A borrowed table's bandwidth is another device's.
        stream_us = session.hot_us(_STREAM, chosen(_STREAM, session.target))
        table.pop("roofline", None)
        table["model"]["bandwidth_gbs"] = round(_READ_SHARE * _STREAM.num_bytes / stream_us / 1e3)
    earlier = earlier_of(table, device, options.ops)
    table["device"] = device.name
    table["measured"] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "driver": device.driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "how": f"CUDA graphs, interleaved, medians: {options.command or 'tilewire.kernels.autotune'}",
        "ops": list(options.ops),
        "gains": {each.op: [each.num_workloads, round(each.geomean, 4), round(each.least, 4)] for each in summaries},
    } | ({"earlier": earlier} if earlier else {})


def earlier_of(table: Table, device: Device, ops: Sequence[str]) -> list[Table]:
    """Where those parts of `table` come from that a tuning of `ops` on `device` leaves as they are, latest first."""
    if table.get("device") != device.name or "measured" not in table:
        return []
    latest = {key: value for key, value in table["measured"].items() if key != "earlier"}
    known = [latest, *table["measured"].get("earlier", [])]
    return [each for each in known if set(each.get("ops", OPS)) - set(ops)]
