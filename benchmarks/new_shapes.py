"""Memory and time that each new shape costs: of what launches keep, and of choosing a kernel. Needs a GPU.

    python -m benchmarks.new_shapes [--shapes 10000]

Kernels that the cache lacks are compiled in a first round, which is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tilewire.kernels import add, matmul, softmax

# Shapes of one figure, and rounds of compiling before the first.
BLOCK, FIRST = 1000, 300
MOST = 400
DEPTH = 64


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def calls() -> dict[str, Callable[[int, int], object]]:
    """The ops, each with two sizes to vary; operands lie in memory that is there."""
    numbers = torch.randn(2**20, device="cuda")
    halves = numbers.bfloat16()

    def product(m: int, n: int) -> torch.Tensor:
        columns = n // 8 * 8 + 8
        return matmul(halves[: m * DEPTH].view(m, DEPTH), halves[: DEPTH * columns].view(DEPTH, columns))

    def matrix(m: int, n: int) -> torch.Tensor:
        return numbers[: m * n].view(m, n)

    return {
        "add": lambda m, n: add(matrix(m, n), matrix(m, n), alpha=3),
        "softmax": lambda m, n: softmax(matrix(m, n)),
        "matmul": product,
    }


def rounds(call: Callable[[int, int], object], num_shapes: int) -> Iterator[tuple[float, float]]:
    """Bytes and microseconds of a new shape, in the mean of each block of them."""
    rng = random.Random(1)
    for number in range(num_shapes // BLOCK):
        shapes = [(rng.randrange(1, MOST), rng.randrange(1, MOST)) for _ in range(BLOCK)]
        if not number:
            for shape in shapes[:FIRST]:
                call(*shape)
        before, began_s = anonymous_bytes(), time.perf_counter()
        for shape in shapes:
            call(*shape)
        yield (anonymous_bytes() - before) / BLOCK, (time.perf_counter() - began_s) / BLOCK * 1e6


def main() -> None:
    """Measures, and prints a line for each op."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=10 * BLOCK)
    num_shapes = parser.parse_args().shapes
    print(torch.cuda.get_device_name())
    for name, call in calls().items():
        found = list(rounds(call, num_shapes))
        most_bytes, us = max(nbytes for nbytes, _ in found), statistics.median(us for _, us in found)
        total_mb = sum(nbytes for nbytes, _ in found) * BLOCK / 1e6
        print(f"{name}: {most_bytes / 1e3:.1f} KB a shape while caches fill, {total_mb:.0f} MB in all, {us:.0f} µs")


if __name__ == "__main__":
    main()
