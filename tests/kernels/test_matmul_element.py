"""The kernel for small products: every tile on operands of any strides, and which products it is chosen for."""

from dataclasses import replace

import pytest
import torch

from tests.support.small_products import DTYPES, SHAPES, small_products
from tilewire.kernels.matmul.configs import Problem
from tilewire.kernels.matmul.members import ELEMENTS, MAX_ELEMENT_K, is_sensible
from tilewire.kernels.matmul.select import explain, select, select_invariant
from tilewire.kernels.runtime.targets import KNOWN

H200 = KNOWN["nvidia_h200"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [pytest.param(*pair, marks=pytest.mark.slow) if number else pair for number, pair in enumerate(DTYPES)],
)
@pytest.mark.parametrize("tile", ELEMENTS, ids=lambda tile: f"{tile.config.block_m} {tile.config.lanes}")
def test_every_tile_is_exact(tile, dtype, out_dtype, shape):
    for product in small_products(shape, dtype, out_dtype, torch.Generator().manual_seed(20261130)):
        assert torch.equal(product.launch(tile.config).double(), product.expected())
        around = product.out.as_strided((*product.out.shape[:-1], product.out.shape[-1] + 3), product.out.stride(), 0)
        assert (around[..., 0] == -7).all()
        assert (around[..., -2:] == -7).all()


@pytest.mark.parametrize(
    ("m", "n", "k", "batch"),
    [
        (3, 3, 3, 65536),
        (4, 4, 4, 10_000),
        (2, 2, 128, 123_088),
        (16, 1, 3, 9104),
        (1, 8, 2, 32768),
        (64, 1, 1, 262_144),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_small_products_of_large_batches_are_its(m, n, k, batch, dtype):
    problem = Problem(m, n, k, batch, dtype, dtype, is_aligned_in=False, is_aligned_out=False)
    problem = replace(problem, is_padded_a=False, is_padded_b=False, is_boxed_out=False)
    assert select(problem, H200).kernel == "element"
    assert "element" in explain(problem, H200)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_large_products_are_not(dtype):
    assert select(Problem(4096, 4096, 1024, 1, dtype, dtype if dtype != "int8" else "int32"), H200).kernel != "element"


def test_long_sums_are_not_one_threads():
    whole, shared = ELEMENTS[0].config, ELEMENTS[-1].config
    assert (whole.lanes, shared.lanes) == (1, 32)
    problem = Problem(1, 1, MAX_ELEMENT_K + 1, 1, "float16", "float16")
    assert not is_sensible(problem, whole, H200)
    assert is_sensible(problem, shared, H200)
    assert not is_sensible(problem, replace(shared, split_k=2), H200)


def test_an_invariant_choice_may_be_one_of_its_tiles():
    problem = Problem(3, 3, 3, 70_000, "float32", "float32", is_aligned_in=False, is_aligned_out=False)
    problem = replace(problem, is_padded_a=False, is_padded_b=False, is_boxed_out=False)
    chosen = {select_invariant(replace(problem, m=m, batch=batch), H200) for m in (1, 3, 900) for batch in (1, 70_000)}
    assert len(chosen) == 1
