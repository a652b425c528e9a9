"""Arrays of other libraries on a GPU go through a service and come back as their own, on their device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tilewire
from tilewire.service.cli.launch import running_server

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

A = np.random.default_rng(1).integers(-3, 4, (37, 65)).astype(np.float32)
B = np.random.default_rng(2).integers(-3, 4, (65, 19)).astype(np.float32)
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
DTYPES = {
    "torch": ["float32", "float16", "bfloat16", "int8", *FLOAT8],
    "cupy": ["float32", "float16", "int8"],
    "jax": ["float32", "float16", "bfloat16", "int8", *FLOAT8],
}


@pytest.fixture(scope="module")
def client() -> Iterator[tilewire.Client]:
    with running_server("--device", "cpu") as url, tilewire.Client(url) as client:
        yield client


def array_of(library: str, values: np.ndarray[Any, Any], dtype: str) -> Any:
    """An array of a library on the GPU."""
    if library == "torch":
        return torch.from_numpy(values).to("cuda", getattr(torch, dtype))
    if library == "jax":
        # Otherwise JAX takes three quarters of the memory, which others need.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    module = pytest.importorskip(library)
    numpy = pytest.importorskip("jax.numpy") if library == "jax" else module
    return numpy.asarray(values.astype(getattr(ml_dtypes, dtype, dtype)))


def values_of(library: str, array: Any) -> Any:
    """The elements of an array of a library, which lies on the GPU."""
    if library == "torch":
        assert array.is_cuda
        return array.double().cpu().numpy()
    if library == "cupy":
        assert isinstance(array, importlib.import_module("cupy").ndarray)
        return array.get().astype(np.float64)
    (device,) = array.devices()
    assert device.platform == "gpu"
    return np.asarray(array).astype(np.float64)


@pytest.mark.parametrize(
    ("library", "dtype"), [(library, dtype) for library, dtypes in DTYPES.items() for dtype in dtypes]
)
def test_arrays_come_back_as_those_of_their_library(library: str, dtype: str, client: tilewire.Client) -> None:
    a, b = array_of(library, A, dtype), array_of(library, np.ascontiguousarray(B.T), dtype).T
    product = client.matmul(a, b, out_dtype="float32" if dtype in FLOAT8 else None)
    np.testing.assert_array_equal(values_of(library, product), A.astype(np.float64) @ B)
    client.put(f"arrays/{library}", a[::2, 1:])
    np.testing.assert_array_equal(client.get(f"arrays/{library}").astype(np.float32), A[::2, 1:])
    if not dtype.startswith(("int", "float8")):
        best, places = client.topk(a, 3)
        assert values_of(library, best).shape == values_of(library, places).shape == (37, 3)
        np.testing.assert_array_equal(values_of(library, best)[:, 0], A.max(-1))
