"""Prepared launches and layouts: the same results as the plain functions, on operands placed as they should be."""

import pytest
import torch

from tilewire.kernels import add, matmul, prepare_add, prepare_matmul, prepare_softmax, softmax
from tilewire.kernels.runtime.launch import Descriptor
from tilewire.kernels.runtime.layouts import ROW_BYTES, lay_out, preferred_layout, row_step


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261121)


def test_prepared_product_takes_other_tensors(generator):
    a, b = torch.randn((20, 40), generator=generator), torch.randn((40, 24), generator=generator)
    bias = torch.randn(24, generator=generator)
    out = torch.empty(20, 24)
    launch = prepare_matmul(a, b, out, bias=bias, activation="relu")
    for _ in range(2):
        a = torch.randn((20, 40), generator=generator)
        launch(a, b, out, bias)
        assert torch.equal(out, matmul(a, b, bias=bias, activation="relu"))


def test_prepared_softmax_keeps_its_axis(generator):
    x = torch.randn((6, 30, 5), generator=generator)
    out = torch.empty_like(x)
    prepare_softmax(x, out, axis=1)(x, out)
    assert torch.equal(out, softmax(x, axis=1))


def test_prepared_add(generator):
    a, b = torch.randn((6, 30), generator=generator), torch.randn(30, generator=generator)
    out = torch.empty_like(a)
    prepare_add(a, b, out, alpha=2)(a, b, out)
    assert torch.equal(out, add(a, b, alpha=2))


def test_preparing_checks():
    ones = torch.ones(4, 4)
    with pytest.raises(ValueError, match="out"):
        prepare_matmul(ones, ones, torch.ones(4, 5))
    with pytest.raises(ValueError, match="out"):
        prepare_softmax(ones, torch.ones(5, 4))
    with pytest.raises(ValueError, match="out"):
        prepare_add(ones, ones, torch.ones(5, 4))
    with pytest.raises(ValueError, match="batch"):
        prepare_matmul(torch.ones(2, 1, 2, 4, 4), torch.ones(1, 3, 1, 4, 4), torch.ones(2, 3, 2, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(5, 65), (64, 781), (3, 5, 7)])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_laying_out_keeps_values_and_pads_rows(dtype, shape, precision, generator):
    tensor = (torch.randn(shape, generator=generator) * 9).to(dtype)
    layout = preferred_layout("matmul", "b", str(dtype).removeprefix("torch."), precision)
    placed = lay_out(tensor, layout)
    assert torch.equal(placed, tensor)
    along, across = (-2, -1) if layout.is_k_major else (-1, -2)
    assert placed.stride(along) == 1
    assert placed.stride(across) * placed.element_size() % ROW_BYTES == 0


def test_only_what_the_matrix_unit_needs_is_transposed():
    for dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
        assert preferred_layout("matmul", "b", dtype).is_k_major
        assert not preferred_layout("matmul", "a", dtype).is_k_major
    assert preferred_layout("matmul", "b", "float32", "tf32").is_k_major
    assert not preferred_layout("matmul", "b", "float32").is_k_major
    assert not preferred_layout("matmul", "b", "bfloat16").is_k_major


def test_row_step():
    assert row_step(781, 2) == 832
    assert row_step(300, 2) == 304
    assert row_step(69, 2) == 80
    assert row_step(63, 2) == 64
    assert row_step(20, 2) == 24
    assert row_step(16, 1) == 16


@pytest.mark.parametrize(
    ("rows", "length", "step"),
    [(100, 40, 40), (100, 40, 48), (100, 40, 128), (7, 200, 200), (3, 1000, 1024), (2, 8, 8), (1, 40, 40), (9, 64, 64)],
)
def test_rows_of_whole_lines_stay_within_the_tensor(rows, length, step):
    whole = Descriptor((5, rows, length), (rows * step, step, 1), (1, 16, 64)).in_whole_lines(2)
    entries, count, reach = whole.shape
    assert entries == 5
    assert whole.strides == (rows * step, step, 1)
    assert (count - 1) * step + reach <= (rows - 1) * step + length
    if reach % 64:
        # The first row would reach out already.
        assert (count, reach) == (1, length)
        assert -(-length // 64) * 64 > (rows - 1) * step + length
    else:
        # One row more would reach out.
        assert reach - length < 64
        assert count == rows or count * step + reach > (rows - 1) * step + length
