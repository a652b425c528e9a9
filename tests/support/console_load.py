"""Mixed load for the console: several clients with several ops, dtypes and sizes, for a bounded time. Knows no browser.

`python -m tests.support.console_load URL --profile gpu --seconds 60` is the same as a command.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tilewire import Client, TilewireError

LONGEST_S = 300.0

Call = tuple[str, Mapping[str, Any]]
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Profile:
    """What a load consists of.

    Attributes:
        weights: Shape and dtype of the residents, by name.
        calls: What each client asks for, in turn.
    """

    weights: Mapping[str, tuple[tuple[int, int], Any]]
    calls: Callable[[int], list[Call]]


def random(worker: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Normal numbers, others for each client."""
    return np.random.default_rng(worker).standard_normal(shape, np.float32).astype(dtype)


def small_calls(worker: int) -> list[Call]:
    """For a machine without a GPU: a few rows against small weights, some softmax, some sums."""
    rows = (4, 16, 16, 64)[worker % 4]
    products: list[Call] = [
        ("matmul", {"a": random(worker, (rows, 1024), ml_dtypes.bfloat16), "b": "@mlp/up"}),
        ("matmul", {"a": random(worker, (rows, 512), ml_dtypes.bfloat16), "b": "@mlp/down"}),
        ("matmul", {"a": random(worker, (rows, 512), np.float16), "b": "@attention/qkv"}),
        ("matmul", {"a": random(worker, (rows, 512)), "b": "@head/vocabulary"}),
    ]
    total = random(worker, (rows, 1024))
    others: list[Call] = [
        ("softmax", {"x": random(worker, (rows, 2048))}),
        ("search", {"a": random(worker, (rows, 512)), "b": "@search/items", "k": 5}),
        ("add", {"a": total, "b": total}),
        ("reduce", {"x": total, "kind": "sum"}),
        # A mistake, as callers make them: the console has something to show under Trouble.
        ("softmax", {"x": total, "axis": 7}),
    ]
    return [call for other in others for call in (*products, other)]


def large_calls(worker: int) -> list[Call]:
    """For a GPU: each client has one kind of work, from what the memory bounds to what the tensor cores do."""
    rows = random(worker, (16, 4096), np.float16)
    kinds: list[Call] = [
        ("matmul", {"a": rows, "b": "@attention/qkv"}),
        ("matmul", {"a": rows, "b": "@attention/out"}),
        ("matmul", {"a": "@batch/activations", "b": "@mlp/up"}),
        ("matmul", {"a": "@table/queries", "b": "@table/keys"}),
        ("matmul", {"a": rows, "b": "@attention/qkv"}),
        ("matmul", {"a": rows, "b": "@attention/out"}),
        ("softmax", {"x": random(worker, (512, 4096))}),
        ("add", {"a": random(worker, (512, 4096), ml_dtypes.bfloat16), "b": "@batch/residual"}),
    ]
    return [kinds[worker % len(kinds)]]


PROFILES = {
    "cpu": Profile(
        {
            "mlp/up": ((1024, 512), ml_dtypes.bfloat16),
            "mlp/down": ((512, 1024), ml_dtypes.bfloat16),
            "attention/qkv": ((512, 1536), np.float16),
            "head/vocabulary": ((512, 2048), np.float32),
            "search/items": ((1000, 512), np.float32),
        },
        small_calls,
    ),
    "gpu": Profile(
        {
            "attention/qkv": ((4096, 6144), np.float16),
            "attention/out": ((4096, 4096), np.float16),
            "batch/activations": ((2048, 8192), ml_dtypes.bfloat16),
            "batch/residual": ((512, 4096), ml_dtypes.bfloat16),
            "mlp/up": ((8192, 2048), ml_dtypes.bfloat16),
            "table/queries": ((2048, 4096), np.float32),
            "table/keys": ((4096, 1024), np.float32),
        },
        large_calls,
    ),
}


def prepare(url: str, profile: str = "cpu") -> None:
    """Uploads the weights that the load uses."""
    with Client(url) as client:
        for number, (name, (shape, dtype)) in enumerate(PROFILES[profile].weights.items()):
            client.put(name, random(number, shape, dtype))


@contextlib.contextmanager
def load(url: str, num_clients: int = 8, pause_s: float = 0.0, profile: str = "cpu") -> Iterator[None]:
    """Keeps clients busy until the block ends, or for `LONGEST_S`."""
    prepare(url, profile)
    is_over = threading.Event()
    threads = [
        threading.Thread(target=_work, args=(url, PROFILES[profile].calls(worker), is_over, pause_s), daemon=True)
        for worker in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)


def _work(url: str, turns: list[Call], is_over: threading.Event, pause_s: float) -> None:
    end_s = time.monotonic() + LONGEST_S
    with Client(url) as client:
        while time.monotonic() < end_s:
            for op, operands in turns:
                if is_over.is_set():
                    return
                # A refusal is an answer that the console shows; the load goes on.
                with contextlib.suppress(TilewireError):
                    _run(client, op, operands)
                time.sleep(pause_s)


def _run(client: Client, op: str, arguments: Mapping[str, Any]) -> None:
    """Runs an op; what is neither an array nor a name of one is an option."""
    operands = {
        name: value for name, value in arguments.items() if isinstance(value, np.ndarray) or str(value)[:1] == "@"
    }
    client.run(op, operands, **{name: value for name, value in arguments.items() if name not in operands})


def main() -> None:
    """The load as a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="cpu")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with load(arguments.url, arguments.clients, arguments.pause_s, arguments.profile):
        time.sleep(min(arguments.seconds, LONGEST_S))


if __name__ == "__main__":
    main()
