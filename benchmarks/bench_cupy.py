"""Our kernels beside CuPy and PyTorch, as a program that has the GPU calls them: first whether results agree, then how fast.

`python -m benchmarks.bench_cupy [--rounds 9] [--out FILE]`

CuPy calls no cuBLAS while a graph is captured, so calls follow one another on one stream between two events. Cases take the
device longer than the host needs for a call. The three take turns, each first as often as the others. Where CuPy has no such
op it is written as its users write it. Needs a GPU and CuPy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_kernels import described
from tilewire import kernels

Calls = Mapping[str, Callable[[], Any]]
OURS, CUPY, TORCH = "Tilewire", "CuPy", "PyTorch"
# Calls between two events take at least so long.
SPAN_US = 10_000.0
MAX_CALLS = 200
TOLERANCE = 2e-2


def run(argv: list[str]) -> int:
    """Run the benchmark with arguments `argv`; the exit status, 1 without a GPU or CuPy, or where results differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each")
    parser.add_argument("--out", type=Path, help="file for the result, JSON")
    arguments = parser.parse_args(argv)
    try:
        import cupy  # noqa: PLC0415  (an extra of no package of ours)
    except ImportError:
        cupy = None
    if cupy is None or not torch.cuda.is_available():
        sys.stderr.write("bench cupy: needs a GPU and CuPy\n")
        return 1
    rows = []
    print(f"{'microseconds of a call':<48}{OURS:>12}{CUPY:>12}{TORCH:>12}")
    for name, calls in cases(cupy):
        is_same, times = agree(calls), timed(calls, arguments.rounds)
        rows.append({"case": name, "agree": is_same, "us": times})
        print(f"{name:<48}" + "".join(f"{us:>12.1f}" for us in times.values()) + ("" if is_same else "  DIFFER"))
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    if arguments.out:
        facts = described("benchmarks.bench_cupy", argv) | {"cupy": cupy.__version__}
        arguments.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return 0 if all(row["agree"] for row in rows) else 1


def cases(cupy: Any) -> Iterator[tuple[str, Calls]]:
    """Yields a name and three calls that return the same; operands of one case are there at a time."""
    for dtype, m, n, k in (
        (torch.float16, 4096, 4096, 4096),
        (torch.float16, 16, 8192, 8192),
        (torch.float16, 4095, 4097, 1001),
        (torch.float32, 2048, 2048, 2048),
    ):
        yield f"matmul {name_of(dtype)} {m} × {n} × {k}", product(cupy, dtype, m, n, k)
    for dtype, rows, width in ((torch.float32, 8192, 8192), (torch.float16, 65536, 1000)):
        yield f"softmax {name_of(dtype)} {rows} × {width}", softmax(cupy, dtype, rows, width)
    x, y = (torch.randn(2**26, device="cuda") for _ in range(2))
    cx, cy = cupy.asarray(x), cupy.asarray(y)
    yield (
        "add float32 67,108,864",
        {OURS: lambda: kernels.add(x, y), CUPY: lambda: cx + cy, TORCH: lambda: x + y},
    )
    wide, tall = torch.randn(16384, 4096, device="cuda"), torch.randn(65536, 512, device="cuda")
    cwide, ctall = cupy.asarray(wide), cupy.asarray(tall)
    yield (
        "sum along rows float32 16384 × 4096",
        {OURS: lambda: kernels.reduce(wide, "sum"), CUPY: lambda: cwide.sum(-1), TORCH: lambda: wide.sum(-1)},
    )
    yield (
        "sum along columns float32 65536 × 512",
        {
            OURS: lambda: kernels.reduce(tall, "sum", axis=0),
            CUPY: lambda: ctall.sum(0),
            TORCH: lambda: tall.sum(0),
        },
    )
    yield "10 largest of each row, float32 4096 × 8192", largest(cupy, 4096, 8192, 10)
    yield "search float16 64 of 1,000,000 × 256, k = 10", search(cupy, 64, 1_000_000, 256, 10)


def name_of(dtype: torch.dtype) -> str:
    """As NumPy calls it."""
    return str(dtype).removeprefix("torch.")


def product(cupy: Any, dtype: torch.dtype, m: int, n: int, k: int) -> Calls:
    """(M, K) by (K, N)."""
    a, b = (torch.randn(shape, device="cuda").to(dtype) / k**0.25 for shape in ((m, k), (k, n)))
    ca, cb = cupy.asarray(a), cupy.asarray(b)
    return {OURS: lambda: kernels.matmul(a, b), CUPY: lambda: ca @ cb, TORCH: lambda: a @ b}


def softmax(cupy: Any, dtype: torch.dtype, rows: int, width: int) -> Calls:
    """Along rows; CuPy's is that of `cupyx.scipy.special`."""
    from cupyx.scipy.special import softmax as of_cupy  # noqa: PLC0415  (comes with CuPy)

    x = torch.randn(rows, width, device="cuda").to(dtype)
    cx = cupy.asarray(x)
    return {OURS: lambda: kernels.softmax(x), CUPY: lambda: of_cupy(cx, axis=-1), TORCH: lambda: x.softmax(-1)}


def largest(cupy: Any, rows: int, width: int, k: int) -> Calls:
    """The k largest of each row, best first; CuPy by `argpartition`, then a sort of what it found."""
    x = torch.randn(rows, width, device="cuda")
    cx = cupy.asarray(x)
    return {
        OURS: lambda: kernels.topk(x, k)[0],
        CUPY: lambda: -cupy.sort(-cupy.take_along_axis(cx, cupy.argpartition(cx, -k, axis=-1)[:, -k:], axis=-1), -1),
        TORCH: lambda: x.topk(k)[0],
    }


def search(cupy: Any, queries: int, items: int, width: int, k: int) -> Calls:
    """The k largest scores of each query; CuPy's and PyTorch's write all scores first."""
    a, b = (torch.randn(rows, width, device="cuda", dtype=torch.float16) for rows in (queries, items))
    ca, cb = cupy.asarray(a), cupy.asarray(b)
    return {
        OURS: lambda: kernels.search(a, b, k)[0],
        CUPY: lambda: -cupy.sort(-cupy.partition(ca @ cb.T, -k, axis=-1)[:, -k:], -1),
        TORCH: lambda: (a @ b.T).topk(k)[0],
    }


def agree(calls: Calls) -> bool:
    """Whether the results of all are the same but for rounding."""
    ours, of_cupy, of_torch = (torch.as_tensor(call(), device="cuda").float() for call in calls.values())
    scale = float(of_torch.abs().max())
    return all(
        one.shape == of_torch.shape and float((one - of_torch).abs().max()) <= TOLERANCE * scale
        for one in (ours, of_cupy)
    )


def timed(calls: Calls, rounds: int) -> dict[str, float]:
    """Medians of a call, in microseconds, by who computes."""
    counts = {name: max(1, min(MAX_CALLS, int(SPAN_US / span(call, 3)))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(span(calls[name], counts[name]))
    return {name: statistics.median(found) for name, found in samples.items()}


def span(call: Callable[[], Any], count: int) -> float:
    """Microseconds of one of `count` calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # PyTorch's
    call()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / count


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
