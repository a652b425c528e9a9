"""The kernels beside the vendor library on this GPU: one table in one run, with geomeans, JSON and plots.

`python -m benchmarks.bench_kernels [--groups large,skinny] [--out benchmarks/results]`
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.command import command_of
from benchmarks.kernel_cases import OURS, THEIRS, Case, all_cases
from benchmarks.svg import Series, plot
from tilewire.kernels import prepare_add, prepare_matmul, prepare_softmax
from tilewire.kernels.autotune.measuring import measure

Row = dict[str, Any]
_RATE_OF_HALF = {"int8": 2.0, "float8_e4m3fn": 2.0, "float32 tf32": 0.5, "float32 tf32x3": 0.5, "float32 ieee": 0.0625}


def run(argv: list[str]) -> int:
    """Run the benchmark with command-line arguments `argv`; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", default="", help="comma-separated prefixes of groups; all without")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each contestant")
    parser.add_argument("--out", type=Path, help="folder for kernels.json and the plots")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("bench kernels: needs a GPU\n")
        return 1
    ceilings = measure_ceilings()
    print(f"ceilings: copy {ceilings['gbs']:.0f} GB/s, 16-bit product {ceilings['tflops']:.0f} TFLOP/s")
    rows = measure_all(arguments.groups, arguments.rounds, ceilings)
    print_geomeans(rows)
    host = {} if arguments.groups else measure_launches()
    for name, each_us in host.items():
        print(f"host time of a prepared launch, {name}: {each_us:.2f} us")
    if arguments.out:
        write(arguments.out, rows, ceilings, host, argv)
    return 0


def measure_ceilings() -> dict[str, float]:
    """What this device reaches in this run: a large copy, bytes read and written, and the vendor's 8192³ product."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copies = {"copy": lambda _: target.copy_(source), "pointwise": lambda _: torch.add(source, 1, out=target)}
    copy_us = min(timing.p50_us for timing in measure(copies, rounds=9).values())
    a, b = (torch.randn((8192, 8192), device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    product_us = measure({"product": lambda _: torch.mm(a, b, out=out)}, rounds=9)["product"].p50_us
    return {"gbs": 2 * (1 << 30) / copy_us / 1e3, "tflops": 2 * 8192**3 / product_us / 1e6}


def measure_all(groups: str, rounds: int, ceilings: dict[str, float]) -> list[Row]:
    """Measure every case whose group begins with one of `groups`, printing rows as they come."""
    wanted = tuple(name for name in groups.split(",") if name)
    columns = f"{'group':<18}{'shape':<22}{'dtype':<16}{'layout':<11}{'name':<9}{'p20':>9}{'p50':>9}{'p80':>9}"
    print(f"{columns} us  rate, ratio, share of the ceiling")
    rows = []
    for group, make in all_cases():
        if wanted and not group.startswith(wanted):
            continue
        rows.append(measure_case(make(), rounds, ceilings))
        print_row(rows[-1])
        torch.cuda.empty_cache()
    return rows


def measure_case(case: Case, rounds: int, ceilings: dict[str, float]) -> Row:
    """Time the contestants of one case and work out what the table shows."""
    timings = measure(case.contestants, case.num_sets, 7 if case.flops > 1e12 else rounds)
    ours_us = timings[OURS].p50_us
    return {
        "group": case.group,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "layout": case.layout,
        "flops": case.flops,
        "bytes": case.num_bytes,
        "us": {name: [timing.p20_us, timing.p50_us, timing.p80_us] for name, timing in timings.items()},
        "ratio": timings[THEIRS].p50_us / ours_us,
        "floor_us": _floor_us(case, ceilings),
        **{f"{name}_ratio": timings[name].p50_us / ours_us for name in ("plain", "read") if name in timings},
    }


def _floor_us(case: Case, ceilings: dict[str, float]) -> float:
    """The least time that the measured ceilings allow."""
    rate = ceilings["tflops"] * _RATE_OF_HALF.get(case.dtype, 1.0)
    return max(case.flops / rate / 1e6, case.num_bytes / ceilings["gbs"] / 1e3)


def print_row(row: Row) -> None:
    """One line for each contestant."""
    shape = "x".join(map(str, row["shape"]))
    for name, (p20, p50, p80) in row["us"].items():
        rate = f"{row['flops'] / p50 / 1e6:7.1f} TFLOP/s" if row["flops"] else f"{row['bytes'] / p50 / 1e3:7.0f} GB/s"
        tail = f"  {rate}"
        if name == OURS:
            tail += f"  x{row['ratio']:.3f}  {row['floor_us'] / p50:.2f}"
            tail += "".join(f"  {key} {row[key]:.3f}" for key in ("plain_ratio", "read_ratio") if key in row)
        print(
            f"{row['group']:<18}{shape:<22}{row['dtype']:<16}{row['layout']:<11}{name:<9}{p20:9.2f}{p50:9.2f}{p80:9.2f}{tail}"
        )


def geomeans(rows: list[Row]) -> dict[str, dict[str, float]]:
    """By group: geomean and least of the ratios to the vendor library."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        ratios[row["group"]].append(row["ratio"])
    return {
        group: {
            "geomean": math.exp(sum(map(math.log, values)) / len(values)),
            "least": min(values),
            "cases": len(values),
        }
        for group, values in ratios.items()
    }


def print_geomeans(rows: list[Row]) -> None:
    """The summary by group."""
    print(f"\n{'group':<18}{'cases':>6}{'geomean':>9}{'least':>8}")
    for group, summary in geomeans(rows).items():
        print(f"{group:<18}{summary['cases']:>6}{summary['geomean']:>9.3f}{summary['least']:>8.3f}")


def measure_launches() -> dict[str, float]:
    """Host microseconds of one prepared launch, the queue never full."""
    x = torch.randn((256, 256), device="cuda").bfloat16()
    out = torch.empty_like(x)
    product, rows, total = prepare_matmul(x, x, out), prepare_softmax(x, out), prepare_add(x, x, out)
    calls = {
        "matmul": lambda: product(x, x, out),
        "softmax": lambda: rows(x, out),
        "add": lambda: total(x, x, out),
        "torch.mm": lambda: torch.mm(x, x, out=out),
    }
    return {name: _host_us(call) for name, call in calls.items()}


def _host_us(call: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            call()
        best = min(best, (time.perf_counter() - begin) * 1e4)
    return best


def described(module: str, argv: list[str]) -> Row:
    """What a result of `module`, called with `argv`, says of this device and of the versions."""
    return {
        "device": torch.cuda.get_device_name(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "command": command_of(module, argv),
    }


def write(folder: Path, rows: list[Row], ceilings: dict[str, float], host: dict[str, float], argv: list[str]) -> None:
    """Results and plots into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        **described("benchmarks.bench_kernels", argv),
        "ceilings": ceilings,
        "geomeans": geomeans(rows),
        "host_us": host,
        "rows": rows,
    }
    (folder / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, text in plots(rows, ceilings).items():
        (folder / f"kernels_{name}.svg").write_text(text)


def plots(rows: list[Row], ceilings: dict[str, float]) -> dict[str, str]:
    """SVG documents by name; only those whose rows were measured."""
    drawn = {}
    large = [row for row in rows if row["group"] in ("large", "small")]
    large = [row for row in large if row["layout"] == "nn" and row["dtype"] == "bfloat16"]
    if large:
        series = [Series(name, sorted(_rates(large, name))) for name in (OURS, THEIRS)]
        drawn["matmul"] = plot("bf16 matmul", "GFLOP in the product", "TFLOP/s", series)
    for dtype in ("float32", "bfloat16"):
        members = [row for row in rows if row["group"] == f"softmax {dtype}" and row["shape"][0] == 4096]
        if members:
            series = [Series(name, sorted(_bandwidths(members, name))) for name in (OURS, THEIRS)]
            drawn[f"softmax_{dtype}"] = plot(f"softmax {dtype}, 4096 rows", "N", "GB/s", series)
    products = [row for row in rows if row["flops"] and row["dtype"] in ("bfloat16", "float16")]
    if products:
        drawn["roofline"] = _roofline(products, ceilings)
    return drawn


def _rates(rows: list[Row], name: str) -> list[tuple[float, float]]:
    return [(row["flops"] / 1e9, row["flops"] / row["us"][name][1] / 1e6) for row in rows]


def _bandwidths(rows: list[Row], name: str) -> list[tuple[float, float]]:
    return [(row["shape"][1], row["bytes"] / row["us"][name][1] / 1e3) for row in rows]


def _roofline(rows: list[Row], ceilings: dict[str, float]) -> str:
    def points(name: str) -> list[tuple[float, float]]:
        return [(row["flops"] / row["bytes"], row["flops"] / row["us"][name][1] / 1e6) for row in rows]

    intensities = sorted(x for x, _ in points(OURS))
    roof = [(x, min(ceilings["tflops"], x * ceilings["gbs"] / 1e3)) for x in intensities]
    series = [Series(OURS, points(OURS), True), Series(THEIRS, points(THEIRS), True), Series("measured roof", roof)]
    return plot("16-bit products under the roofline", "flops for each byte", "TFLOP/s", series, is_log_y=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
