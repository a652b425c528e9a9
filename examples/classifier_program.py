"""A classifier as a program: recorded from NumPy-like code, kept on the server, run by one request.

python examples/classifier_program.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tilewire import Client

FEATURES, HIDDEN, CLASSES = 64, 32, 10


def main(url: str) -> None:
    """Records, runs, compares with NumPy, and removes."""
    rng = np.random.default_rng(0)
    w1 = rng.standard_normal((FEATURES, HIDDEN)).astype(np.float32)
    w2 = rng.standard_normal((HIDDEN, CLASSES)).astype(np.float32)

    def classify(x: Any) -> Any:
        hidden = np.maximum(x @ w1, 0)
        return hidden @ w2

    with Client(url) as client:
        # w1 and w2 are uploaded as classify/c0 and classify/c1.
        program = client.trace(classify, x=("float32", (-1, FEATURES)))
        x = rng.standard_normal((4, FEATURES)).astype(np.float32)
        logits = program(x=x)
        np.testing.assert_allclose(logits, classify(x), rtol=1e-3, atol=1e-3)
        print("classes:", logits.argmax(axis=-1))
        program.delete()
        for name in ("classify/c0", "classify/c1"):
            client.delete(name)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
