"""Residents lie as the op that reads them first takes them, and are right for whatever reads them later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tilewire
from tests.support.live_server import serving
from tests.support.transfers import uploaded
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.host import TORCH_DTYPES
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.registry import OPS
from tilewire.service.ops.search import SearchOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

PLAIN, TURNED = MatmulOptions(), MatmulOptions(transpose_b=True)


@pytest.mark.parametrize(
    ("dtype", "op", "options", "name", "axis"),
    [
        ("int8", "matmul", PLAIN, "b", -2),
        ("int8", "matmul", TURNED, "b", -1),
        ("int8", "matmul", PLAIN, "a", -1),
        ("int8", "matmul", MatmulOptions(transpose_a=True), "a", -2),
        ("int8", "search", SearchOptions(k=1), "b", -1),
        ("float8_e4m3fn", "matmul", TURNED, "b", -1),
        ("float32", "matmul", PLAIN, "b", -1),
        ("float32", "matmul", MatmulOptions(precision="tf32"), "b", -2),
        ("float16", "matmul", TURNED, "b", -1),
    ],
)
def test_memory_lies_as_the_first_op_reads_it(dtype: str, op: str, options: Any, name: str, axis: int) -> None:
    # Not at the top: it imports Triton, which the kernels' tests put into its interpreter first.
    from tilewire.service.engine.backends.gpu.backend import GpuBackend

    backend, kind = GpuBackend("cuda:0"), TensorType(dtype, (3, 70, 45))
    values = torch.arange(kind.num_elements).remainder(97).to(TORCH_DTYPES[dtype]).view(kind.shape)
    held = uploaded(backend, HostBytes(values.reshape(-1).view(torch.uint8), kind, 0))
    laid_out = backend.lay_out(held, OPS[op], name, options)
    assert laid_out.stride(axis) == 1
    # Rows begin at multiples of 16 bytes.
    assert laid_out.stride(-3 - axis) * laid_out.element_size() % 16 == 0
    assert torch.equal(laid_out.cpu().float(), values.float())
    assert backend.lay_out(laid_out, OPS[op], name, options) is laid_out


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tilewire.Client]:
    path = tmp_path_factory.mktemp("layouts") / "log"
    with (
        serving(path, "--device", "cuda:0", "--gateways", "1", "--no-spare-engine") as server,
        tilewire.Client(server.url, timeout=300) as client,
    ):
        yield client


@pytest.mark.parametrize("first", ["matmul", "transposed", "search"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_what_reads_a_resident_later_is_right(client: tilewire.Client, dtype: str, first: str) -> None:
    if (dtype, first) == ("float8_e4m3fn", "search"):
        pytest.skip("no search of float8")
    kind: Any = np.int8 if dtype == "int8" else ml_dtypes.float8_e4m3fn
    rng = np.random.default_rng(5)
    w, a = (rng.integers(-3, 4, shape).astype(kind) for shape in ((96, 96), (5, 96)))
    kept = client.put(f"layouts/{dtype}/{first}", w)
    exact, left = w.astype(np.float32), a.astype(np.float32)

    def check(op: str) -> None:
        if op == "search":
            if dtype == "int8":
                got = client.search(a, kept, k=3)
                np.testing.assert_array_equal(got.values, -np.sort(-(left @ exact.T), axis=1)[:, :3])
            return
        got = client.matmul(a, kept, transpose_b=op == "transposed").astype(np.float32)
        expected = left @ (exact.T if op == "transposed" else exact)
        np.testing.assert_allclose(got, expected, rtol=0.01, atol=0.01)

    for _ in range(2):
        for op in (first, "search", "transposed", "matmul"):
            check(op)
    np.testing.assert_array_equal(kept.fetch().astype(np.float32), exact)
