"""One small matrix product: its request, and a check of its answer."""

from __future__ import annotations

import numpy as np

from tests.support.float64_oracle import random_array
from tests.support.raw_http import post
from tests.support.tensor_bodies import TYPES, decode, to_safetensors

A, B = random_array("float32", (8, 8), 1), random_array("float32", (8, 8), 2)
BODY = to_safetensors({"a": A, "b": B})
MATMUL = post("/v1/matmul", BODY, content_type=TYPES["safetensors"])
EXPECTED = A.astype(np.float64) @ B.astype(np.float64)


def check_product(body: bytes) -> None:
    """Compares an answer in safetensors."""
    np.testing.assert_allclose(decode(TYPES["safetensors"], body), EXPECTED, rtol=1e-4, atol=1e-5)
