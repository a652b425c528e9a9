"""What `tilewire.dask` refuses before anything is sent."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

da = pytest.importorskip("dask.array")
td = pytest.importorskip("tilewire.dask")

# Nobody listens there.
SERVICES = td.Services(["http://127.0.0.1:9"], timeout_s=0.1)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("shape", "axis"), [((0,), 0), ((2, 3, 0), -1), ((2, 0, 3), -1), ((2, 0, 3), 1), ((0, 2), 1)])
def test_sums_and_means_of_nothing_are_numpys(shape: tuple[int, ...], axis: int) -> None:
    x = da.zeros(shape, chunks=2, dtype=np.float16)
    total, mean = (call(x, SERVICES, axis=axis).compute() for call in (td.total, td.mean))
    np.testing.assert_array_equal(total, np.zeros(shape).sum(axis=axis))
    assert np.shape(mean) == np.shape(total)
    assert np.isnan(mean).all()
    assert (total.dtype, mean.dtype) == (np.float32, np.float32)


def test_sums_of_int8_have_a_bound() -> None:
    left = da.ones((2, 140_000), chunks=(2, 50_000), dtype=np.int8)
    right = da.ones((140_000, 3), chunks=(50_000, 3), dtype=np.int8)
    words = r"K = 140000 overflows the int32 accumulator of int8; the limit is 131071"
    with pytest.raises(ValueError, match=words):
        td.matmul(left, right, SERVICES)
    assert td.matmul(left[:, :131_071], right[:131_071], SERVICES).shape == (2, 3)
    wide = left.astype(np.float32)
    assert td.matmul(wide, right.astype(np.float32), SERVICES).shape == (2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: td.matmul(np.ones((2, 2)), x, SERVICES),
            r"a: expected a dask array, got ndarray; type da.from_array",
        ),
        (lambda x: td.matmul(x.astype(np.float32), [[1.0]], SERVICES), "b: expected a dask array, got list"),
        (lambda x: td.matmul(x, x, SERVICES), r"a: matmul does not take float64; type a\.astype\(np\.float32\)"),
        (lambda x: td.softmax(x, SERVICES), "x: softmax does not take float64"),
        (lambda x: td.total(x, SERVICES), "x: reduce does not take float64"),
        (lambda x: td.mean(np.ones(2), SERVICES), "x: expected a dask array"),
    ],
)
def test_what_no_service_takes(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words) as raised:
        call(da.ones((2, 2)))
    assert "cast" not in str(raised.value)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8])
def test_a_block_keeps_its_dtype(dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype).T
    block = td.Block.of(array)
    assert block.array.dtype == dtype
    np.testing.assert_array_equal(block.array, array)
    # Other elements have another name, also of the same bytes.
    assert block.name != td.Block.of(array.view(np.uint8 if dtype is np.int8 else np.uint16)).name


def test_blocks_of_the_same_bytes_in_another_byte_order_are_others() -> None:
    little = np.arange(1, 5, dtype="<f4").reshape(2, 2)
    swapped = little.view(">f4")
    assert td.Block.of(little).name != td.Block.of(swapped).name
    assert td.Block.of(little).name == td.Block.of(little.astype(">f4")).name
    np.testing.assert_array_equal(td.Block.of(swapped).array, swapped)


@pytest.mark.parametrize("is_left", [True, False])
def test_masked_elements_of_blocks_are_not_sent(is_left: bool) -> None:
    ones = np.ones((2, 2), np.float32)
    masked, plain = da.from_array(np.ma.masked_array(ones, [[False, True], [False, False]])), da.from_array(ones)
    product = td.matmul(masked, plain, SERVICES) if is_left else td.matmul(plain, masked, SERVICES)
    with pytest.raises(TypeError, match="filled"):
        product.compute(scheduler="synchronous")
