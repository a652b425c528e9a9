"""NumPy code whose products run on a server: weights stay there, and only small operands travel.

python examples/numpy_offload.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewire import Client

SIZE = 1024
ROWS = 64


def milliseconds(call: Callable[[], Any]) -> float:
    """The best of five calls, after one that warms up."""
    times = []
    for _ in range(6):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return min(times[1:])


def main(url: str) -> None:
    """Compares NumPy with a product whose weight travels and with one whose weight stays."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, SIZE)).astype(np.float32)
    weight = rng.standard_normal((SIZE, SIZE)).astype(np.float32)
    with Client(url) as client:
        w = client.put("examples/weight", weight)
        np.testing.assert_allclose(x @ w, x @ weight, rtol=1e-3, atol=1e-3)
        print(f"NumPy here:        {milliseconds(lambda: x @ weight):8.2f} ms")
        print(f"the weight travels: {milliseconds(lambda: client.matmul(x, weight)):7.2f} ms")
        print(f"the weight stays:   {milliseconds(lambda: x @ w):7.2f} ms")
        answer = client.run("matmul", {"a": x, "b": w})
        print("where the time goes, ms:", dict(answer.timings_ms))
        w.delete()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
