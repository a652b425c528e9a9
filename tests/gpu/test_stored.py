"""Results that stay on a GPU: without a way through the host, with a copy that follows, and lost with the engine before it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch

import tilewire
from tests.support.live_server import LiveServer, serving
from tilewire.service.engine.tensors.transfers import pieces_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--device", "cuda:0", "--gateways", "1", "--no-spare-engine", "--host-copy-bytes-per-s", "1")
    with serving(tmp_path_factory.mktemp("stored") / "log", *flags) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[tilewire.Client]:
    with tilewire.Client(server.url, timeout=300) as client:
        yield client


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("shape", [(64, 256, 128), (257, 781, 127), (1, 64, 64)])
def test_a_stored_product_is_the_answered_one(
    client: tilewire.Client, dtype: type, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    rng = np.random.default_rng(m)
    a: np.ndarray = rng.standard_normal((m, k)).astype(dtype)
    b: np.ndarray = rng.standard_normal((k, n)).astype(dtype)
    expected = client.matmul(a, b)
    stored = client.matmul(a, b, store="gpu/y", durable=True)
    np.testing.assert_allclose(stored.fetch().astype(np.float64), expected.astype(np.float64), rtol=1e-2, atol=1e-2)
    # As an operand, with rows as the kernel left them.
    np.testing.assert_allclose(
        client.softmax(stored).astype(np.float64), client.softmax(expected).astype(np.float64), atol=1e-2
    )


def test_a_result_is_lost_with_its_engine_unless_it_is_durable(server: LiveServer, client: tilewire.Client) -> None:
    x = np.ones((64, 64), np.float32)
    lost, durable = client.add(x, x, store="gpu/lost"), client.add(x, x, store="gpu/durable", durable=True)
    np.testing.assert_array_equal(lost.fetch(), x + x)
    for victim in server.engines():
        os.kill(victim, signal.SIGKILL)
    end_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            np.testing.assert_array_equal(durable.fetch(), x + x)
            break
        except (tilewire.Unavailable, tilewire.ConnectionFailed):
            assert time.monotonic() < end_s
    with pytest.raises(tilewire.Lost, match="lost with the engine"):
        lost.fetch()
    client.add(x, x, store="gpu/lost")
    np.testing.assert_array_equal(lost.fetch(), x + x)


@pytest.mark.parametrize(("rows", "columns"), [(1000, 3000), (513, 511)], ids=["flat", "padded"])
def test_the_copier_copies_beside_the_batches(rows: int, columns: int) -> None:
    # Not at the top: it imports Triton, which the kernels' tests put into its interpreter first.
    from tilewire.service.engine.backends.gpu.backend import GpuBackend

    copier = GpuBackend("cuda:0").open_copier()
    tensor = torch.randn(rows, columns + 1, device="cuda")[:, : columns + columns % 2]
    whole = torch.empty(tensor.shape)
    # As a result is when its copy begins: the copier's stream awaits no other.
    torch.cuda.synchronize()
    for piece, place in pieces_of(tensor, whole):
        copier.copy(piece, place)
    assert torch.equal(whole, tensor.cpu())
