"""What each op must give, in float64 NumPy, and how far an answer may be from it.

The bound of a product is that of a float32 sum of K terms, whatever their order, plus one rounding to the result's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.live_server import BACKEND
from tests.support.tensor_bodies import NUMPY, Array

SQRT_2_OVER_PI = float(np.sqrt(2 / np.pi))
ACTIVATIONS: dict[str, Any] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
}
# Steepest slope of any activation, rounded up: what an error before it can grow to.
MAX_SLOPE = 1.2


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Numbers that the dtype holds, of moderate size."""
    generator = np.random.default_rng(seed)
    if dtype == "int8":
        return generator.integers(-128, 128, shape).astype(np.int8)
    if dtype.startswith("int"):
        return generator.integers(-1000, 1000, shape).astype(dtype)
    return np.asarray(generator.standard_normal(shape)).astype(NUMPY[dtype])


def assert_close(answer: Array, expected: Array, slack: Array | float) -> None:
    """Fails where the answer is further from float64 than the slack and one rounding to its dtype; NaN and inf must agree."""
    shown = answer.astype(np.float64)
    assert answer.shape == expected.shape
    is_float = answer.dtype.kind not in "iu"
    eps = float(ml_dtypes.finfo(answer.dtype).eps) if is_float else 0.0
    tiny = float(ml_dtypes.finfo(answer.dtype).smallest_subnormal) if is_float else 0.0
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(shown), np.isnan(expected))
    np.testing.assert_array_equal(shown[~finite], expected[~finite])
    with np.errstate(invalid="ignore"):
        error = np.abs(shown - expected)
    bound = np.broadcast_to(slack + eps * np.abs(expected) + tiny, expected.shape)
    worst = np.where(finite, error - bound, -1.0)
    assert not np.any(worst > 0), f"off by up to {np.max(error[finite])}, more than {np.max(bound[finite])}"


def matmul(arrays: Mapping[str, Array], options: Mapping[str, Any]) -> tuple[Array, Array]:
    """The product in float64, and the slack of float32 accumulation for each element."""
    a, b = arrays["a"].astype(np.float64), arrays["b"].astype(np.float64)
    a = np.swapaxes(a, -1, -2) if options.get("transpose_a") else a
    b = np.swapaxes(b, -1, -2) if options.get("transpose_b") else b
    scale = arrays.get("a_scale", np.ones(1)).astype(np.float64).reshape(-1, 1)
    scale = scale * arrays.get("b_scale", np.ones(1)).astype(np.float64).reshape(1, -1)
    bias = arrays.get("bias", np.zeros(1)).astype(np.float64)
    total = (a @ b) * scale + bias
    size = (np.abs(a) @ np.abs(b)) * np.abs(scale) + np.abs(bias)
    is_exact = arrays["a"].dtype == np.int8 and options.get("out_dtype", "int32") == "int32"
    unit = {"tf32": 2**-10}.get(str(options.get("precision", "")), 2**-24)
    # A float8 matrix unit keeps some 13 bits within a block; see `kernel_bounds`.
    of_block = 2**-13 if arrays["a"].dtype.name.startswith("float8") and BACKEND == "gpu" else 0.0
    slack = np.zeros_like(size) if is_exact else MAX_SLOPE * ((a.shape[-1] + 8) * unit + of_block) * size
    return ACTIVATIONS[options.get("activation", "none")](total), slack


def softmax(x: Array, axis: int = -1, *, log: bool = False) -> tuple[Array, float]:
    """Softmax in float64, and the slack of float32."""
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        top = np.max(wide, axis=axis, keepdims=True, initial=-np.inf)
        shifted = wide - top
        total = np.sum(np.exp(shifted), axis=axis, keepdims=True)
        out = shifted - np.log(total) if log else np.exp(shifted) / total
    return out, 2**-20 * (16.0 if log else 1.0)
