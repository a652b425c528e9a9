"""The first lines that a scientist types: each does what NumPy or torch would, or says what to type."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch

import tilewire
from tests.unit.client.speaking_server import SpeakingServer
from tilewire.service.dtypes import DTYPES

X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
W = np.array([[1, 0], [0, 1], [1, 1]], np.float32)


@pytest.fixture
def c(url: str) -> Iterator[tilewire.Client]:
    with tilewire.Client(url) as client:
        yield client


def test_1_float64_says_what_to_type(c: tilewire.Client, url: str, server: SpeakingServer) -> None:
    with pytest.raises(
        TypeError, match=r'a: matmul does not take float64; type a\.astype\(np\.float32\).*cast="float32"'
    ):
        c.matmul(np.random.rand(2, 2), np.random.rand(2, 2))
    assert server.requests == []
    a = np.random.rand(2, 2)
    got = tilewire.Client(url, cast="float32").matmul(a, a)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, a @ a, rtol=1e-5)


def test_2_lists_of_floats(c: tilewire.Client) -> None:
    got = c.matmul([[1.0, 2.0]], [[3.0], [4.0]])
    assert got.dtype == np.float32
    assert got.tolist() == [[11.0]]


def test_3_lists_of_integers(c: tilewire.Client) -> None:
    got = c.matmul([[1, 2]], [[3], [4]])
    assert got.dtype == np.float32
    assert got.tolist() == [[11.0]]


def test_4_a_number_takes_the_dtype_of_the_array(c: tilewire.Client) -> None:
    for x in (X, X.astype(np.float16), X.astype(np.int32), X.astype(ml_dtypes.bfloat16)):
        got = c.add(x, 1)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x + x.dtype.type(1))
    assert c.add(X.astype(np.float16), 0.5).dtype == np.float16
    # As in NumPy: no integer holds the half.
    assert c.add(X.astype(np.int32), 0.5).dtype == np.float64


def test_5_vectors_follow_np_matmul(c: tilewire.Client) -> None:
    v, u = np.array([1, 2, 3], np.float32), np.array([3, 4], np.float32)
    np.testing.assert_array_equal(c.matmul(X, v), np.matmul(X, v))
    np.testing.assert_array_equal(c.matmul(u, X), np.matmul(u, X))
    np.testing.assert_array_equal(c.matmul(v, v), np.matmul(v, v))
    assert c.matmul(v, v).shape == ()
    stack = np.stack([X, X + 1, X + 2])
    np.testing.assert_array_equal(c.matmul(stack, v), np.matmul(stack, v))
    with pytest.raises(ValueError, match="b: matmul takes no single number"):
        c.matmul(X, 2.0)
    with pytest.raises(ValueError, match="store: a product with a vector"):
        c.matmul(X, v, store="y")


@pytest.mark.parametrize(
    "dtype", [np.float16, "float16", np.dtype("float16"), "<f2", torch.float16, np.ones(1, np.float16).dtype.type]
)
def test_6_out_dtype_is_whatever_np_dtype_takes(c: tilewire.Client, server: SpeakingServer, dtype: object) -> None:
    assert c.matmul(X, W, out_dtype=dtype).dtype == np.float16
    assert server.requests[-1].url.params["out_dtype"] == "float16"


@pytest.mark.parametrize("dtype", ["bfloat16", ml_dtypes.bfloat16, torch.bfloat16])
def test_6_out_dtype_may_be_bfloat16(c: tilewire.Client, dtype: object) -> None:
    assert c.matmul(X, W, out_dtype=dtype).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["flaot16", object, "complex64", 3])
def test_6_out_dtype_that_is_none(c: tilewire.Client, server: SpeakingServer, dtype: object) -> None:
    with pytest.raises(TypeError, match="no dtype that can be sent") as raised:
        c.matmul(X, W, out_dtype=dtype)
    # The service's own, and no more.
    assert set(str(raised.value).partition("expected one of ")[2].split(", ")) == set(DTYPES)
    assert server.requests == []


def test_7_a_stored_result_is_an_operand(c: tilewire.Client) -> None:
    c.put("w", W)
    y = c.matmul(X, "@w", store="y")
    np.testing.assert_allclose(c.softmax(y), c.softmax(X @ W), rtol=1e-6)
    described = y.described
    assert isinstance(described, tilewire.TensorInfo)
    np.testing.assert_array_equal(c.add(described, 1), X @ W + 1)


def test_8_torch_in_torch_out(c: tilewire.Client) -> None:
    a, b = torch.from_numpy(X), torch.from_numpy(W)
    got = c.matmul(a, b)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, a @ b)
    assert torch.equal(c.matmul(a, W), a @ b)
    assert torch.equal(c.matmul(a.T.contiguous().T, b), a @ b)


def test_9_bfloat16_and_float8_of_torch(c: tilewire.Client) -> None:
    a, b = torch.from_numpy(X).bfloat16(), torch.from_numpy(W).bfloat16()
    got = c.matmul(a, b)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, a @ b)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        got = c.matmul(a.to(dtype), b.to(dtype), out_dtype=torch.bfloat16)
        assert torch.equal(got, a.to(dtype).bfloat16() @ b)


def test_10_tensors_that_require_gradients(c: tilewire.Client) -> None:
    a = torch.from_numpy(X.copy()).requires_grad_()
    got = c.softmax(a)
    assert not got.requires_grad
    assert torch.allclose(got, torch.softmax(a.detach(), -1))


def test_11_handles(c: tilewire.Client) -> None:
    w = c.put("weights/w1", W)
    assert repr(c) == f"Client('{c._base_url}')"
    assert tilewire.__version__ >= "0.1.0"
    for handle in (w, c.tensors["weights/w1"]):
        np.testing.assert_array_equal(X @ handle, X @ W)
        assert (handle.shape, handle.dtype, handle.ndim, handle.nbytes) == ((3, 2), "float32", 2, 24)
        assert repr(handle) == "Tensor('weights/w1', shape=(3, 2), dtype=float32)"
        assert "3 × 2" in handle._repr_html_()
        np.testing.assert_array_equal(handle.fetch(), W)
        np.testing.assert_array_equal(np.asarray(handle), W)
    np.testing.assert_array_equal([[1, 2, 3]] @ w, [[4, 5]])
    assert torch.equal(torch.from_numpy(X) @ w, torch.from_numpy(X @ W))
    w.delete()
    assert "weights/w1" not in c.tensors
    with pytest.raises(tilewire.NotFound):
        _ = c.tensors["weights/w1"].shape


@pytest.mark.parametrize(
    "address", ["localhost:8000", "127.0.0.1:8000", "gpu-box", "ftp://gpu-box", "", "http://", "http://h:x"]
)
def test_12_an_address_without_a_scheme(address: str) -> None:
    for kind in (tilewire.Client, tilewire.AsyncClient):
        with pytest.raises(ValueError, match=r"http://|no address"):
            kind(address)
    if address == "localhost:8000":
        with pytest.raises(ValueError, match="type 'http://localhost:8000'"):
            tilewire.Client(address)
