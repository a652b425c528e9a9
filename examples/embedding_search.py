"""Search over embeddings: the items stay on the server, each request brings queries and takes the best items home.

python examples/embedding_search.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys

import numpy as np

from tilewire import Client

NUM_ITEMS = 20_000
DIMENSIONS = 128
NUM_QUERIES = 5
BEST = 3


def main(url: str) -> None:
    """Stores embeddings, searches them by cosine, and excludes some."""
    rng = np.random.default_rng(0)
    items = rng.standard_normal((NUM_ITEMS, DIMENSIONS)).astype(np.float32)
    chosen = rng.integers(0, NUM_ITEMS, NUM_QUERIES)
    queries = items[chosen] + 0.1 * rng.standard_normal((NUM_QUERIES, DIMENSIONS)).astype(np.float32)
    with Client(url) as client:
        embeddings = client.put("examples/embeddings", items)
        values, indices = client.search(queries, embeddings, k=BEST, metric="cosine")
        assert (indices[:, 0] == chosen).all()
        for row, (found, scores) in enumerate(zip(indices, values, strict=True)):
            print(f"query {row}: {', '.join(f'{i} ({s:.3f})' for i, s in zip(found, scores, strict=True))}")
        # Items that are sold out: -inf excludes them.
        excluded = np.zeros(NUM_ITEMS, np.float32)
        excluded[chosen] = -np.inf
        others = client.search(queries, embeddings, k=BEST, metric="cosine", bias=excluded)
        assert not np.isin(others.indices, chosen).any()
        embeddings.delete()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
