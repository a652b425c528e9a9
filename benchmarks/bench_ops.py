"""Search, topk, reduce, normalize and pointwise beside PyTorch on this GPU: first whether they are right, then how fast.

`python -m benchmarks.bench_ops [--seconds 225] [--only search,topk] [--out folder] [--random 40 --seed SEED]`

With `--random` the cases are so many random ones of each op, for which nothing was tuned.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import op_random
from benchmarks.op_cases import CHECKS, TIMINGS
from benchmarks.op_cases import wanted_variants as wanted
from tilewire.kernels.autotune.measuring import measure
from tilewire.kernels.op import geomean
from tilewire.kernels.runtime.targets import Target, current

Row = dict[str, Any]
_COMPILE_S = 100.0
# Share of the time after which no further check starts.
_CHECKED = 0.6


def run(argv: list[str]) -> int:
    """Run the benchmark with command-line arguments `argv`; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=225.0, help="no case starts later than this")
    parser.add_argument("--only", default="", help="comma-separated ops; all without")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant")
    parser.add_argument("--random", type=int, default=0, help="measure so many random cases of each op")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the random cases")
    parser.add_argument("--out", type=Path, help="folder for ops.jsonl")
    parser.add_argument("--compile", default="", help="for its own use: which share of the binaries to compile")
    arguments = parser.parse_args(argv)
    only = tuple(filter(None, arguments.only.split(",")))
    if arguments.compile:
        return compile_share(arguments.compile, only)
    if not torch.cuda.is_available():
        sys.stderr.write("bench ops: needs a GPU\n")
        return 1
    begin_s = time.monotonic()
    report = Report(arguments.out and arguments.out / "ops.jsonl")
    compile_all(only, report)
    if arguments.random:
        run_random(arguments.seed, arguments.random, only, report, begin_s + arguments.seconds)
        return 0
    for op, name, check in CHECKS:
        if (not only or op in only) and time.monotonic() - begin_s < arguments.seconds * _CHECKED:
            report.add(attempt({"op": op, "check": name}, check))
    for op, name, make in TIMINGS:
        if (not only or op in only) and time.monotonic() - begin_s < arguments.seconds:
            report.add(attempt({"op": op, "case": name}, functools.partial(timed, make, arguments.rounds)))
            torch.cuda.empty_cache()
    print(f"wrong or failed: {report.num_bad} of {report.num_rows}; {time.monotonic() - begin_s:.0f} s")
    return 0


def run_random(seed: int, count: int, only: tuple[str, ...], report: Report, until_s: float) -> None:
    """Measure random cases until the clock says `until_s`, and print how many times faster than PyTorch each op is."""
    report.add({"op": "all", "check": "seed", "detail": f"{seed} on {torch.cuda.get_device_name(0)}"})
    ratios: dict[str, list[float]] = defaultdict(list)
    for case in op_random.cases(seed, count):
        if time.monotonic() > until_s or (only and case.op not in only):
            continue
        row = attempt({"op": case.op, "case": case.name}, functools.partial(timed_random, case))
        report.add(row)
        if "us" in row:
            ratios[case.op].append(row["us"]["torch"] / row["us"]["chosen"])
        torch.cuda.empty_cache()
    for op, found in ratios.items():
        print(f"{op:<10} {len(found)} cases: geomean {geomean(found):.3f}, least {min(found):.2f}")
    together = [ratio for found in ratios.values() for ratio in found]
    print(f"together   {len(together)} cases: geomean {geomean(together):.3f}; wrong or failed: {report.num_bad}")


def timed_random(case: op_random.Case) -> Row:
    """Time one random case, and compare the public function's result."""
    contestants, num_sets, is_right = case.make()
    timings = measure(contestants, num_sets, 5)
    return {
        "us": {name: timing.p50_us for name, timing in timings.items()},
        "bytes": 0,
        "is_right": is_right(),
    }


class Report:
    """Rows, printed and written as they come, a line of JSON each."""

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w")
        self.num_rows = self.num_bad = 0

    def add(self, row: Row) -> None:
        """Print and write one row."""
        self.num_rows += 1
        self.num_bad += row.get("error") is not None or row.get("is_right") is False
        for line in lines_of(row):
            print(line, flush=True)
        if self._file:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def lines_of(row: Row) -> Iterator[str]:
    """One line for a check, one for each contestant of a timing."""
    title = f"{row['op']:<10}{row.get('check') or row.get('case') or ''}"
    if row.get("error"):
        yield f"{title}  FAILED {row['error'].strip().splitlines()[-1][:200]}"
    elif "us" not in row:
        yield f"{title}  {'ok' if row.get('is_right', True) else 'WRONG'} {row.get('detail', '')}"
    elif not row["bytes"]:
        shown = ", ".join(f"{name} {us:.1f} us" for name, us in row["us"].items())
        yield f"{title}  {row['us']['torch'] / row['us']['chosen']:.2f}: {shown}{'' if row['is_right'] else '  WRONG'}"
    else:
        yield title
        for name, us in sorted(row["us"].items(), key=lambda item: item[1]):
            yield f"    {name:<64}{us:10.1f} us {row['bytes'] / us / 1e6:6.2f} TB/s"


def attempt(row: Row, call: Callable[[], Row]) -> Row:
    """`row` with what `call` returns, or with its error."""
    try:
        return row | call()
    except Exception:  # noqa: BLE001 - one case must not end the others
        return row | {"error": traceback.format_exc()[-3000:]}


def timed(make: Callable[[], tuple[dict[str, Any], float]], rounds: int) -> Row:
    """Time the contestants that `make` returns; one that fails is left out, with its error."""
    contestants, num_bytes = make()
    errors = {name: str(call)[-500:] for name, call in contestants.items() if not callable(call)}
    contestants = {name: call for name, call in contestants.items() if callable(call)}
    timings = measure(contestants, 1, rounds)
    us = {name: timing.p50_us for name, timing in timings.items()}
    return {"us": us, "bytes": num_bytes, "left_out": errors}


def compile_all(only: tuple[str, ...], report: Report) -> None:
    """Compile what the cases launch on all cores, into Triton's cache."""
    begin_s = time.monotonic()
    shares = max(1, (os.cpu_count() or 2) - 1)
    environment = os.environ | {"TILEWIRE_BENCH_TARGET": json.dumps(asdict(current(0))), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.bench_ops", "--only", ",".join(only), "--compile"]
    children = [subprocess.Popen([*command, f"{share}/{shares}"], env=environment) for share in range(shares)]
    for child in children:
        try:
            child.wait(max(0.1, _COMPILE_S - (time.monotonic() - begin_s)))
        except subprocess.TimeoutExpired:
            child.kill()
    report.add({"op": "all", "check": "compiled", "detail": f"{time.monotonic() - begin_s:.0f} s"})


def compile_share(share: str, only: tuple[str, ...]) -> int:
    """Compile every `of`-th binary from `number` on, as `share` = number/of says."""
    number, of = map(int, share.split("/"))
    target = replace(Target(**json.loads(os.environ["TILEWIRE_BENCH_TARGET"])))
    for variant in wanted(target, only)[number::of]:
        try:
            variant.compile(target)
        except Exception as error:  # noqa: BLE001 - the case that launches it says so, too
            print(f"not compiled: {variant.described()[:200]}: {str(error)[:200]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
