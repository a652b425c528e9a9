"""The kernel for small products on a GPU: every tile, and large batches through the public function."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.matmul_reference import matmul_reference
from tests.support.small_products import DTYPES, SHAPES, small_products
from tilewire.kernels import matmul
from tilewire.kernels.matmul.members import ELEMENTS
from tilewire.kernels.matmul.plan import Epilogue, prepare

GENERATOR = torch.Generator("cuda").manual_seed(20261130)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize("tile", ELEMENTS, ids=lambda tile: f"{tile.config.block_m} {tile.config.lanes}")
def test_every_tile_is_exact(tile, dtype, out_dtype, shape):
    for product in small_products(shape, dtype, out_dtype, GENERATOR):
        assert torch.equal(product.launch(tile.config).double(), product.expected())


@pytest.mark.parametrize("activation", ["gelu", "silu", "sigmoid", "tanh", "leaky_relu"])
@pytest.mark.parametrize("tile", ELEMENTS, ids=lambda tile: f"{tile.config.block_m} {tile.config.lanes}")
def test_activations(tile, activation):
    a, b = (torch.randn((40, 5, 5), device="cuda", generator=GENERATOR) for _ in "ab")
    out = torch.empty_like(a)
    prepare(a, b, out, Epilogue(activation=activation), "ieee", tile.config)(a, b, out, None, None, None)
    torch.testing.assert_close(out.double(), matmul_reference(a, b, activation=activation), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [
        (1_000_003, 3, 3, 3),
        (70_001, 4, 4, 4),
        (1, 367_372, 1, 22),
        (1, 1, 1_003_808, 3),
        (262_144, 64, 1, 1),
        (5, 30_000, 17, 2),
        (49, 256, 1, 384),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_batches_and_long_vectors(batch, m, n, k, dtype):
    a = torch.randint(-2, 3, (batch, m, k), device="cuda", generator=GENERATOR).to(dtype)
    b = torch.randint(-2, 3, (batch, k, n), device="cuda", generator=GENERATOR).to(dtype)
    out = matmul(a, b)
    for some in (slice(0, 500), slice(max(0, batch - 500), batch)):
        assert torch.equal(out[some].double(), matmul_reference(a[some], b[some]).to(dtype).double())


def test_rows_that_lie_far_apart():
    """Offsets within a program beyond 2^31 elements."""
    whole = torch.empty(3 * 2**30 + 8, dtype=torch.float16, device="cuda")
    a = whole.as_strided((4, 4), (2**30 - 5, 1))
    a.copy_(torch.randint(-2, 3, (4, 4), device="cuda", generator=GENERATOR))
    b = torch.randint(-2, 3, (4, 3), device="cuda", generator=GENERATOR).half()
    for tile in ELEMENTS:
        out = torch.empty((4, 3), dtype=torch.float16, device="cuda")
        prepare(a, b, out, Epilogue(), "ieee", tile.config)(a, b, out, None, None, None)
        assert torch.equal(out.double(), matmul_reference(a, b))
