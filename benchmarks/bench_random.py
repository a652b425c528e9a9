"""What dispatch gives shapes that nobody tuned for, beside what others give them.

`python -m benchmarks.bench_random [--seed SEED] [--scale 1.0] [--seconds 400] [--ops matmul,softmax]
[--groups ieee,tf32] [--online-tuning] [--out FOLDER]`

Random shapes of every group (`KernelOp.groups`): log-uniform sizes, layers of language models, unaligned operands, each
dtype. Dispatch's choice, every other member of the catalogue and PyTorch run interleaved, from CUDA graphs, on operand sets
beyond L2; where `nvmath-python` is installed, cuBLASLt with its heuristics searched runs too. The yardstick is the fastest
of the others. With `--online-tuning` each product is raced first as a service races it, with `--kernels triton` and with
`fastest`; those choices then stand in the same comparison. A seed is drawn by default; never use one that tables were
fitted to: their `measured.how` names those.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.svg import Series, plot
from tilewire.kernels.autotune import collect
from tilewire.kernels.autotune.workloads import as_line, parse_line
from tilewire.kernels.matmul.configs import VENDOR
from tilewire.kernels.op import Shape, config_text, geomean
from tilewire.kernels.registry import measured_ops

Row = dict[str, Any]


def run(argv: Sequence[str]) -> int:
    """Run the benchmark with command-line arguments `argv`; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the shapes; a new one by default")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of shapes")
    parser.add_argument("--seconds", type=float, default=400.0, help="for compiling and measuring together")
    parser.add_argument("--ops", default=",".join(op.name for op in measured_ops()))
    parser.add_argument("--groups", default="", help="only these groups of shapes")
    parser.add_argument("--online-tuning", action="store_true", help="race each product as a service does, too")
    parser.add_argument("--out", type=Path, default=Path("random-measured"), help="folder for measurements and results")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("bench random: needs a GPU\n")
        return 1
    options = [f"--{name}={getattr(arguments, name)}" for name in ("seed", "scale", "seconds", "ops", "groups", "out")]
    flags = ["--catalogue", *(["--online-tuning"] if arguments.online_tuning else [])]
    status = collect.main([*options, *flags])
    if status:
        return status
    entries = list(collect.entries_of(arguments.out / collect.FILE))
    rows = rows_of(entries, group_names(arguments.seed, arguments.scale, arguments.ops.split(",")))
    write(arguments.out, rows, entries[0], arguments.seed)
    print(report(rows))
    return 0


def group_names(seed: int, scale: float, ops: Sequence[str]) -> dict[str, str]:
    """The group of each shape, by its line."""
    return {as_line(shape): name for shape, name in collect.drawn(seed, scale, ops).items()}


def rows_of(entries: Sequence[Row], groups: dict[str, str]) -> list[Row]:
    """For each shape: microseconds of dispatch's choice, of the catalogue's fastest, and of the fastest of the others."""
    found = []
    for entry in entries:
        if "line" in entry and entry["own"] in entry["us"]:
            others = entry["vendors"]
            row = {
                "group": groups.get(entry["line"], "?"),
                "shape": entry["shape"],
                "us": entry["us"][entry["own"]],
                "best_us": min(entry["us"].values()),
                "config": entry["own"],
            }
            if others:
                row |= {"other": min(others, key=others.__getitem__), "other_us": min(others.values())}
            for name, config in entry.get("online", {}).items():
                # What the service calls is the first of PyTorch's.
                us = (
                    others.get("torch", row["us"])
                    if config == config_text(VENDOR)
                    else entry["us"].get(config, row["us"])
                )
                row[f"online_{name}_us"] = us
            found.append(row)
    return found


def report(rows: Sequence[Row]) -> str:
    """A table: for each group, how many times faster than the others, and how near the catalogue's fastest."""
    times = {"us": "", **{f"online_{name}_us": name for name in ("triton", "fastest")}}
    has_online = any("online_triton_us" in row for row in rows)
    shown = list(times) if has_online else ["us"]
    heads = "".join(f"{times[key] + ' geomean' if times[key] else 'geomean':>17}{'least':>7}" for key in shown)
    lines = [f"{'group':<16}{'shapes':>7}{heads}   {'of our fastest':>14}"]
    for name, group in grouped(rows).items():
        figures = ""
        for key in shown:
            ratios = [row["other_us"] / row[key] for row in group if "other_us" in row and key in row]
            figures += f"{geomean(ratios):>17.3f}{min(ratios):>7.2f}" if ratios else f"{'-':>17}{'-':>7}"
        near = geomean([row["us"] / row["best_us"] for row in group])
        lines.append(f"{name:<16}{len(group):>7}{figures}   {near:>14.3f}")
    return "\n".join(lines)


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by group."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["group"]].append(row)
    return dict(sorted(found.items()))


def write(folder: Path, rows: Sequence[Row], device: Row, seed: int) -> None:
    """`random.json` and a plot of the ratio over the bytes of a shape."""
    (folder / "random.json").write_text(json.dumps({"seed": seed, "device": device, "rows": list(rows)}) + "\n")
    series = [
        Series(
            name, [(size_of(row), row["other_us"] / row["us"]) for row in group if "other_us" in row], is_scattered=True
        )
        for name, group in grouped(rows).items()
    ]
    shown = [one for one in series if one.points]
    if shown:
        title = f"Time of the fastest other over ours, seed {seed}"
        (folder / "random.svg").write_text(plot(title, "bytes moved", "ratio", shown))


def size_of(row: Row) -> float:
    """Bytes that a shape moves at least."""
    shape: Shape = parse_line(json.dumps(row["shape"]))
    return float(shape.num_bytes)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
