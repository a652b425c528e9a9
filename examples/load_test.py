"""Many requests at once from asyncio: they share launches on the server. `tilewire bench URL` does this without code.

python examples/load_test.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np

from tilewire import AsyncClient

REQUESTS, AT_ONCE = 200, 16
SHAPE = (16, 256)


async def load(url: str) -> None:
    """Sends the requests and prints latencies and batch sizes."""
    x = np.ones(SHAPE, np.float32)
    places = asyncio.Semaphore(AT_ONCE)
    latencies_ms: list[float] = []
    batch_sizes: list[int] = []
    # Refused requests, 429 and 503, are sent again after the wait that the server asks for.
    async with AsyncClient(url, max_retries=5) as client:
        w = await client.put("examples/load", np.eye(SHAPE[1], dtype=np.float32))

        async def one() -> None:
            async with places:
                began = time.perf_counter()
                answer = await client.run("matmul", {"a": x, "b": w})
                latencies_ms.append((time.perf_counter() - began) * 1e3)
                batch_sizes.append(answer.batch_size or 1)

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(REQUESTS)))
        seconds = time.perf_counter() - began
        await w.delete()
    latencies_ms.sort()
    print(
        f"{REQUESTS / seconds:.0f} requests/s, p50 {latencies_ms[REQUESTS // 2]:.1f} ms, p99 {latencies_ms[-2]:.1f} ms"
    )
    print(f"{sum(batch_sizes) / REQUESTS:.1f} requests per launch")


if __name__ == "__main__":
    asyncio.run(load(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
