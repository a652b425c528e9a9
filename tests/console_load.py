"""Mixed load for the console: several clients with several ops, dtypes and sizes, for a bounded time. Knows no browser."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import ml_dtypes
import numpy as np

from tilewire import Client, Operand, TilewireError

WEIGHTS = {
    "mlp/up": ((1024, 512), ml_dtypes.bfloat16),
    "mlp/down": ((512, 1024), ml_dtypes.bfloat16),
    "attention/qkv": ((512, 1536), np.float16),
    "head/vocabulary": ((512, 2048), np.float32),
}
LONGEST_S = 300.0

Call = tuple[str, Mapping[str, Operand]]


def prepare(url: str) -> None:
    """Uploads the weights that the load uses."""
    rng = np.random.default_rng(0)
    with Client(url) as client:
        for name, (shape, dtype) in WEIGHTS.items():
            client.put(name, rng.standard_normal(shape).astype(dtype))


def calls(worker: int) -> list[Call]:
    """What one client asks for, in turn; most of it against resident weights."""
    rng = np.random.default_rng(worker)

    def random(*shape: int, dtype: object = np.float32) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)  # type: ignore[call-overload, no-any-return]

    rows = (4, 16, 16, 64)[worker % 4]
    products: list[Call] = [
        ("matmul", {"a": random(rows, 1024, dtype=ml_dtypes.bfloat16), "b": "@mlp/up"}),
        ("matmul", {"a": random(rows, 512, dtype=ml_dtypes.bfloat16), "b": "@mlp/down"}),
        ("matmul", {"a": random(rows, 512, dtype=np.float16), "b": "@attention/qkv"}),
        ("matmul", {"a": random(rows, 512), "b": "@head/vocabulary"}),
    ]
    others: list[Call] = [
        ("softmax", {"x": random(rows, 2048)}),
        ("add", {"a": random(rows, 1024), "b": random(rows, 1024)}),
    ]
    return [*products, others[0], *products, others[1]]


@contextlib.contextmanager
def load(url: str, num_clients: int = 8, pause_s: float = 0.0) -> Iterator[None]:
    """Keeps clients busy until the block ends, or for `LONGEST_S`."""
    prepare(url)
    is_over = threading.Event()
    threads = [
        threading.Thread(target=_work, args=(url, calls(worker), is_over.is_set, pause_s), daemon=True)
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


def _work(url: str, turns: list[Call], is_over: Callable[[], bool], pause_s: float) -> None:
    end_s = time.monotonic() + LONGEST_S
    with Client(url) as client:
        while not is_over() and time.monotonic() < end_s:
            for op, operands in turns:
                # A refusal is an answer that the console shows; the load goes on.
                with contextlib.suppress(TilewireError):
                    client.run(op, operands)
                time.sleep(pause_s)
                if is_over():
                    return
