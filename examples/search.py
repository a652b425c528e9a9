"""Search over a million embeddings: they stay on the device, requests bring queries and take the best items home.

    python examples/search.py [http://127.0.0.1:8000] [--items 1000000]

The answers are exact, so there is no index to build and no recall to measure.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from tilewire import Client

DIMENSIONS = 128
NUM_QUERIES = 64
BEST = 5
TRIES = 5
NAME = "examples/embeddings"


def main() -> None:
    """Stores embeddings, finds noisy copies of some, leaves some out, and takes the time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--items", type=int, default=1_000_000, help="how many embeddings")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    # float16 halves the bytes on the way and on the device; scores are summed in float32.
    items = rng.standard_normal((arguments.items, DIMENSIONS), np.float32).astype(np.float16)
    chosen = rng.choice(arguments.items, NUM_QUERIES, replace=False)
    noise = 0.1 * rng.standard_normal((NUM_QUERIES, DIMENSIONS), np.float32)
    queries = items[chosen] + noise.astype(np.float16)

    with Client(arguments.url) as client:
        began_s = time.perf_counter()
        embeddings = client.put(NAME, items)
        print(f"{embeddings}: uploaded in {time.perf_counter() - began_s:.1f} s")
        try:
            search(client, queries, chosen, items)
        finally:
            embeddings.delete()


def search(client: Client, queries: np.ndarray, chosen: np.ndarray, items: np.ndarray) -> None:
    """Searches by cosine, checks what was found, and repeats without those."""
    values, indices = client.search(queries, f"@{NAME}", k=BEST, metric="cosine")
    assert (indices[:, 0] == chosen).all()
    nearest = items[indices[0]].astype(np.float32)
    query = queries[0].astype(np.float32)
    cosines = nearest @ query / np.linalg.norm(nearest, axis=1) / np.linalg.norm(query)
    np.testing.assert_allclose(values[0], cosines, atol=2e-3)
    print("best of the first query:", ", ".join(f"{i} ({s:.3f})" for i, s in zip(indices[0], values[0], strict=True)))

    # Items that are sold out: -inf excludes them.
    excluded = np.zeros(len(items), np.float32)
    excluded[chosen] = -np.inf
    others = client.search(queries, f"@{NAME}", k=BEST, metric="cosine", bias=excluded)
    assert not np.isin(others.indices, chosen).any()

    times_ms = []
    for _ in range(TRIES):
        began_s = time.perf_counter()
        client.search(queries, f"@{NAME}", k=BEST, metric="cosine")
        times_ms.append((time.perf_counter() - began_s) * 1e3)
    best_ms = min(times_ms)
    print(
        f"{len(queries)} queries over {len(items):,} items: {best_ms:.1f} ms, {len(queries) / best_ms * 1e3:,.0f} queries/s"
    )


if __name__ == "__main__":
    main()
