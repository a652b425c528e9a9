"""A classifier as a program behind Triton's client: recorded from NumPy-like code, kept, and called as a model of `/v2`.

    python examples/classifier.py [http://127.0.0.1:8000]

Needs `pip install 'tritonclient[http]'` for the second half; whoever calls a Triton server today keeps that client.
"""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tilewire import Client

FEATURES, HIDDEN, CLASSES, BEST = 64, 32, 10, 3


def main(url: str) -> None:
    """Records a network, runs it from either client, compares with NumPy, and removes it."""
    rng = np.random.default_rng(0)
    w1 = rng.standard_normal((FEATURES, HIDDEN)).astype(np.float32)
    b1 = rng.standard_normal(HIDDEN).astype(np.float32)
    w2 = rng.standard_normal((HIDDEN, CLASSES)).astype(np.float32)

    def classify(x: Any) -> Any:
        hidden = np.maximum(x @ w1 + b1, 0)
        return (hidden @ w2).softmax().topk(BEST)

    x = rng.standard_normal((4, FEATURES)).astype(np.float32)
    logits = np.maximum(x @ w1 + b1, 0) @ w2
    expected = np.argsort(-logits, axis=-1)[:, :BEST]
    with Client(url) as client:
        # The weights are uploaded beside it, under names that begin with classify/c0, classify/c1, …
        program = client.trace(classify, x=("float32", (-1, FEATURES)))
        try:
            print("program:", program)
            best = program(x=x)
            np.testing.assert_array_equal(best.indices, expected)
            print("best classes:", best.indices[:, 0])
            np.testing.assert_array_equal(by_triton(url, x), expected)
        finally:
            program.delete()
            for tensor in client.tensors():
                if tensor.name.startswith("classify/"):
                    tensor.delete()


def by_triton(url: str, x: np.ndarray) -> np.ndarray:
    """Calls the same program as a model, with Triton's unmodified client."""
    from tritonclient.http import InferenceServerClient, InferInput  # noqa: PLC0415  (only this half needs it)

    with InferenceServerClient(urlsplit(url).netloc) as client:
        metadata = client.get_model_metadata("classify")
        print("model:", metadata["name"], [one["name"] for one in metadata["outputs"]])
        operand = InferInput("x", list(x.shape), "FP32")
        operand.set_data_from_numpy(x)
        answer = client.infer("classify", [operand])
        indices: np.ndarray = answer.as_numpy("indices")
        return indices


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
