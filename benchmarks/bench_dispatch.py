"""What dispatch's choice costs: beside the best binary of the catalogue, for random shapes that nobody tuned for.

`python -m benchmarks.bench_dispatch [--shapes 200] [--budget-s 400] [--out benchmarks/results]`

Every member of the catalogue that can compute a shape is tried on it, at every split, interleaved, from CUDA graphs over
operand sets past L2. Of a hundred readings the least is also the luckiest, so the fastest and dispatch's choice are timed
once more, only those two in turns, and these readings count. With `--beyond`, what `tilewire tune` would try for the shape
runs too, whether the catalogue has it or not. The catalogue's binaries come from Triton's cache; what it lacks is compiled
before anything is measured.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.command import command_of
from tilewire.kernels.autotune.alternatives import alternatives, chosen
from tilewire.kernels.autotune.benches import GpuBench
from tilewire.kernels.autotune.compiling import Compiler
from tilewire.kernels.autotune.drawing import draw
from tilewire.kernels.autotune.exhaustive import Everything
from tilewire.kernels.autotune.racing import Bench, race
from tilewire.kernels.autotune.workloads import Config, Workload, as_line, geomean
from tilewire.kernels.build.loading import load_all
from tilewire.kernels.build.precompile import is_complete, precompile
from tilewire.kernels.runtime.launch import on_compile
from tilewire.kernels.runtime.targets import Target, current

Row = dict[str, Any]
WITHIN = 1.10
# How often dispatch's choice and the fastest are timed once more.
_AGAIN_ROUNDS = 21


def run(argv: list[str]) -> int:
    """Run the benchmark with command-line arguments `argv`; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=200, help="how many, of all ops together")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--budget-s", type=float, default=400.0, help="stop measuring after this long")
    parser.add_argument("--ops", default="matmul,softmax,add")
    parser.add_argument(
        "--where", nargs="*", default=[], metavar="FIELD=VALUE", help="only shapes like this, dtype=int8"
    )
    parser.add_argument(
        "--beyond", action="store_true", help="beside all that tuning would try, not the catalogue alone"
    )
    parser.add_argument("--out", type=Path, help="folder for dispatch.json")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("bench dispatch: needs a GPU\n")
        return 1
    target = current(torch.cuda.current_device())
    if not is_complete(target):
        begin = time.monotonic()
        done = precompile(target)
        print(f"compiled {done.num_compiled} of {done.num_variants} binaries in {time.monotonic() - begin:.0f} s")
    compiled: list[str] = []
    on_compile(compiled.append)
    begin = time.monotonic()
    loaded = load_all(target, torch.cuda.current_device())
    print(f"loaded {len(loaded)} binaries in {time.monotonic() - begin:.1f} s")
    workloads = shapes(arguments.seed, arguments.shapes, target, arguments.ops.split(","), arguments.where)
    with Compiler() as compiler:
        everything = Everything(target, compiler) if arguments.beyond else None
        rows = measure_all(workloads, target, GpuBench(), arguments.budget_s, time.monotonic, everything)
        if everything:
            print(f"candidates compiled beside the catalogue: {everything.num_compiled}")
    summary = summarise(rows)
    print_summary(summary, len(rows), len(workloads))
    print(f"compiled while measuring: {len(compiled)}")
    if arguments.out:
        write(arguments.out, rows, summary, argv)
    return 0


def shapes(
    seed: int,
    count: int,
    target: Target,
    ops: Collection[str] = ("matmul", "softmax", "add"),
    where: Iterable[str] = (),
) -> list[Workload]:
    """Random workloads, log-uniform in size, of every dtype and layout, none of them among those tuned for.

    Args:
        seed: of the draw.
        count: how many are drawn; what is of no such op, or not as `where` says, is then left out.
        target: the device.
        ops: of which ops.
        where: `field=value`, all of which a workload must have.
    """
    wanted = [pair.partition("=")[::2] for pair in where]
    drawn = draw(random.Random(seed), target)
    return [
        each
        for each in itertools.islice(drawn, count)
        if each.op in ops and all(str(getattr(each, name, None)) == value for name, value in wanted)
    ]


def measure_all(
    workloads: list[Workload],
    target: Target,
    bench: Bench,
    budget_s: float,
    clock: Callable[[], float],
    everything: Everything | None = None,
) -> list[Row]:
    """Measure workloads in order until the budget is spent, printing rows as they come."""
    begin = clock()
    rows = []
    for workload in workloads:
        if clock() - begin > budget_s:
            break
        beyond = everything.candidates(workload) if everything else []
        row = measure_one(workload, target, bench, beyond)
        if row is None:
            print(f"        dispatch's choice failed: {as_line(workload)}")
            continue
        rows.append(row)
        print(f"{row['regret']:6.3f}  {row['us']:9.2f} us  {row['num_tried']:>4} tried  {as_line(workload)}")
        if row["regret"] > WITHIN:
            print(f"        chosen {row['chosen']}\n        best   {row['best']}  {row['best_us']:.2f} us")
    return rows


def measure_one(workload: Workload, target: Target, bench: Bench, beyond: Sequence[Config] = ()) -> Row | None:
    """Time all ways to compute one workload; how dispatch's compares, None when it failed.

    Args:
        workload: what is computed.
        target: the device.
        bench: what times.
        beyond: configurations that run beside the catalogue's.
    """
    ours = chosen(workload, target)
    times = race(bench, workload, [*alternatives(workload, target), *beyond], must=[ours])
    if ours not in times:
        return None
    best = min(times, key=times.__getitem__)
    if best != ours:
        again = bench.in_turns_us(workload, [ours, best], _AGAIN_ROUNDS)
        times |= zip((ours, best), again, strict=True)
        best = min((ours, best), key=times.__getitem__)
    return {
        "workload": json.loads(as_line(workload)),
        "us": times[ours],
        "best_us": times[best],
        "regret": times[ours] / times[best],
        "num_tried": len(times),
        "chosen": str(ours),
        "best": str(best),
    }


def summarise(rows: list[Row]) -> dict[str, dict[str, float]]:
    """By op and over all: geomean and most of the times to the best's, and the share within 10 %."""
    by_op: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_op[row["workload"]["op"]].append(row["regret"])
        by_op["all"].append(row["regret"])
    return {
        op: {
            "shapes": len(values),
            "geomean": geomean(values),
            "most": max(values),
            "within_10_percent": sum(value <= WITHIN for value in values) / len(values),
        }
        for op, values in by_op.items()
    }


def print_summary(summary: dict[str, dict[str, float]], num_done: int, num_wanted: int) -> None:
    """One line for each op."""
    print(f"\n{num_done} of {num_wanted} shapes; time of dispatch's choice over the best's")
    print(f"{'op':<10}{'shapes':>7}{'geomean':>9}{'most':>8}{'within 10 %':>13}")
    for op, figures in sorted(summary.items(), key=lambda item: item[0] == "all"):
        share = f"{figures['within_10_percent']:.1%}"
        print(f"{op:<10}{figures['shapes']:>7}{figures['geomean']:>9.3f}{figures['most']:>8.3f}{share:>13}")


def write(folder: Path, rows: list[Row], summary: dict[str, dict[str, float]], argv: list[str]) -> None:
    """Results into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "device": torch.cuda.get_device_name(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "command": command_of("benchmarks.bench_dispatch", argv),
        "summary": summary,
        "rows": rows,
    }
    (folder / "dispatch.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
