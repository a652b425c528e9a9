"""Every op beside PyTorch on odd shapes: short axes, tiny batched products, vectors, views. First right, then how fast.

`python -m benchmarks.bench_odd_shapes [--seed SEED] [--seconds 400] [--ops matmul,add] [--out FILE]`

Cases run in the order in which the seed draws them until the time is over. Times are medians of CUDA graphs, interleaved,
of one set of operands: small ones stay in L2. Both sides allocate their results.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.bench_kernels import described
from benchmarks.bench_ops import Report, Row, attempt
from benchmarks.odd_shapes import DRAWS, Case, cases
from benchmarks.op_cases import DEVICE
from tilewire.kernels.autotune.measuring import measure
from tilewire.kernels.op import geomean

# A shorter case is a matter of the launch.
_LONG_US = 5.0
_SHARES = (0.8, 0.5)


def run(argv: list[str]) -> int:
    """Run the benchmark with command-line arguments `argv`; the exit status, 1 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the cases; a new one by default")
    parser.add_argument("--seconds", type=float, default=400.0, help="no case starts later than this")
    parser.add_argument("--ops", default=",".join(DRAWS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--out", type=Path, help="file for a line of JSON a case")
    arguments = parser.parse_args(argv)
    ops = arguments.ops.split(",")
    if unknown := [op for op in ops if op not in DRAWS]:
        parser.error(f"--ops: expected some of {','.join(DRAWS)}, got {','.join(unknown)}")
    if not torch.cuda.is_available():
        sys.stderr.write("bench odd_shapes: needs a GPU\n")
        return 1
    report = Report(arguments.out)
    facts = described("benchmarks.bench_odd_shapes", argv)
    detail = f"{arguments.seed} on {facts['device']}"
    report.add({"op": "all", "check": "seed", "detail": detail, "seed": arguments.seed, **facts})
    rows = []
    for row in measured(cases(arguments.seed, ops), arguments.rounds, time.monotonic() + arguments.seconds):
        report.add(row)
        rows.append(row)
    print(table(rows))
    return 0


def measured(drawn: Iterator[Case], rounds: int, until_s: float) -> Iterator[Row]:
    """Yields a row a case until the clock says `until_s`, or the device takes no more."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # PyTorch's
    for case in drawn:
        if time.monotonic() > until_s:
            return
        row = attempt({"op": case.op, "case": case.name}, functools.partial(timed, case, rounds, stream))
        yield row
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            sys.stderr.write(f"bench odd_shapes: the device failed: {error}\n")
            return


def timed(case: Case, rounds: int, stream: torch.cuda.Stream) -> Row:
    """Compare one case's results, then time both sides."""
    tensors = case.tensors(DEVICE)
    is_right = case.is_right(tensors)
    sides = {"chosen": lambda _: case.ours(*tensors), "torch": lambda _: case.theirs(*tensors)}
    timings = measure(sides, 1, rounds, stream)
    return {"us": {name: timing.p50_us for name, timing in timings.items()}, "bytes": 0, "is_right": is_right}


def table(rows: Sequence[Row]) -> str:
    """For each op PyTorch's time over ours: geomean, least, and the shares below limits where either takes 5 µs or more."""
    by_op: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_op[row["op"]].append(row)
    heads = "".join(f"{f'below {limit}':>11}" for limit in _SHARES)
    lines = [f"{'op':<10}{'cases':>7}{'wrong':>7}{'failed':>8}{'geomean':>9}{'least':>7}{'from 5 us':>11}{heads}"]
    for op, found in [*by_op.items(), ("together", list(rows))]:
        times = [row["us"] for row in found if "us" in row]
        wrong, failed = (sum(row.get("is_right") is False for row in found), sum("error" in row for row in found))
        ratios = [us["torch"] / us["chosen"] for us in times]
        long = [us["torch"] / us["chosen"] for us in times if max(us.values()) >= _LONG_US]
        least = f"{min(ratios):.2f}" if ratios else "-"
        mean = f"{geomean(ratios):.3f}" if ratios else "-"
        shares = "".join(f"{_share(long, limit):>11}" for limit in _SHARES)
        lines.append(f"{op:<10}{len(found):>7}{wrong:>7}{failed:>8}{mean:>9}{least:>7}{len(long):>11}{shares}")
    return "\n".join(lines)


def _share(ratios: Sequence[float], limit: float) -> str:
    return f"{sum(ratio < limit for ratio in ratios) / len(ratios):.1%}" if ratios else "-"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
