"""Every op, dtype, format and option over HTTP against float64 NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import float64_oracle as oracle
from tests.support.float64_oracle import assert_close, random_array
from tests.support.tensor_bodies import CARRIES, NUMPY, TYPES, Array, decode, encode, to_npz

FLOATS = ("float16", "bfloat16", "float32")
FP8 = ("float8_e4m3fn", "float8_e5m2")
MATMUL_DTYPES = (*FLOATS, "int8", *FP8)
ADD_DTYPES = (*FLOATS, "float64", "int32", "int64")
NAMED = ("safetensors", "npz", "json")


def call(
    client: httpx.Client, op: str, arrays: Mapping[str, Array], form: str = "safetensors", **options: Any
) -> Array:
    body, headers = encode(form, arrays)
    query = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    response = client.post(f"/v1/{op}", params=query, content=body, headers=headers)
    assert response.status_code == 200, response.text
    return decode(response.headers["content-type"], response.content)


def check_matmul(
    client: httpx.Client, arrays: Mapping[str, Array], expected_dtype: str, form: str = "safetensors", **options: Any
) -> None:
    out = call(client, "matmul", arrays, form, **options)
    assert out.dtype.name == expected_dtype
    expected, slack = oracle.matmul(arrays, options)
    assert_close(out, expected, slack)


def matmul_out(dtype: str) -> str:
    return {"int8": "int32"}.get(dtype, "bfloat16" if dtype in FP8 else dtype)


@pytest.mark.parametrize(
    ("form", "dtype"), [(form, dtype) for form in NAMED for dtype in MATMUL_DTYPES if dtype in CARRIES[form]]
)
def test_matmul_in_every_dtype_and_format(client: httpx.Client, form: str, dtype: str) -> None:
    arrays = {"a": random_array(dtype, (17, 65), 1), "b": random_array(dtype, (65, 33), 2)}
    if form == "npz" and matmul_out(dtype) not in CARRIES["npz"]:
        pytest.fail("no such case")
    check_matmul(client, arrays, matmul_out(dtype), form)


@pytest.mark.parametrize(
    ("form", "dtype"), [(form, dtype) for form in NAMED for dtype in FLOATS if dtype in CARRIES[form]]
)
@pytest.mark.parametrize("log", [False, True])
def test_softmax_in_every_dtype_and_format(client: httpx.Client, form: str, dtype: str, log: bool) -> None:
    x = random_array(dtype, (5, 7, 781), 3)
    out = call(client, "softmax", {"x": x}, form, log=log)
    assert out.dtype.name == dtype
    assert_close(out, *oracle.softmax(x, log=log))


@pytest.mark.parametrize("dtype", FLOATS[::2])
def test_softmax_of_an_unnamed_npy_tensor(client: httpx.Client, dtype: str) -> None:
    x = random_array(dtype, (9, 31), 4)
    assert_close(call(client, "softmax", {"x": x}, "npy"), *oracle.softmax(x))


@pytest.mark.parametrize(
    ("form", "dtype"), [(form, dtype) for form in NAMED for dtype in ADD_DTYPES if dtype in CARRIES[form]]
)
def test_add_in_every_dtype_and_format(client: httpx.Client, form: str, dtype: str) -> None:
    a, b = random_array(dtype, (3, 1, 5), 5), random_array(dtype, (4, 1), 6)
    out = call(client, "add", {"a": a, "b": b}, form, alpha=3)
    assert out.dtype.name == dtype
    expected = a.astype(np.float64) + 3 * b.astype(np.float64)
    assert_close(out, expected, 0.0 if dtype.startswith("int") else 2**-22 * np.abs(expected) + 2**-22)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 4, 5), (5, 6)),
        ((4, 5), (2, 3, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 6)),
        ((1, 1, 1, 1, 1, 1, 2, 3), (3, 2)),
        ((7, 1, 1), (7, 1, 1)),
    ],
)
def test_leading_dimensions_broadcast_as_batches(client: httpx.Client, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check_matmul(client, {"a": random_array("float32", a, 1), "b": random_array("float32", b, 2)}, "float32")


@pytest.mark.parametrize("dtype", MATMUL_DTYPES)
@pytest.mark.parametrize(("transpose_a", "transpose_b"), [(True, False), (False, True), (True, True)])
def test_transposes(client: httpx.Client, dtype: str, transpose_a: bool, transpose_b: bool) -> None:
    a, b = random_array(dtype, (2, 13, 21), 1), random_array(dtype, (2, 21, 9), 2)
    arrays = {
        "a": np.ascontiguousarray(a.swapaxes(-1, -2)) if transpose_a else a,
        "b": np.ascontiguousarray(b.swapaxes(-1, -2)) if transpose_b else b,
    }
    check_matmul(client, arrays, matmul_out(dtype), transpose_a=transpose_a, transpose_b=transpose_b)


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_after_the_bias(client: httpx.Client, activation: str, dtype: str) -> None:
    arrays = {
        "a": random_array(dtype, (16, 8), 1),
        "b": random_array(dtype, (8, 24), 2),
        "bias": random_array("float32", (24,), 3),
    }
    check_matmul(client, arrays, dtype, activation=activation)


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", MATMUL_DTYPES)
def test_matmul_out_dtypes(client: httpx.Client, dtype: str, out_dtype: str) -> None:
    arrays = {"a": random_array(dtype, (8, 16), 1), "b": random_array(dtype, (16, 8), 2)}
    if dtype == "int8":
        # Small numbers: the products would leave the range of float16.
        arrays = {name: array // 4 for name, array in arrays.items()}
    check_matmul(client, arrays, out_dtype, out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", ["float32", "float64", "int64", "int32"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_add_of_integers_into_other_dtypes(client: httpx.Client, dtype: str, out_dtype: str) -> None:
    a, b = random_array(dtype, (6,), 1), random_array(dtype, (6,), 2)
    out = call(client, "add", {"a": a, "b": b}, out_dtype=out_dtype)
    assert out.dtype.name == out_dtype
    np.testing.assert_array_equal(out, a + b)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_wrap_as_in_numpy(client: httpx.Client, dtype: str) -> None:
    top = np.array([np.iinfo(dtype).max, np.iinfo(dtype).min, -1], dtype)
    with np.errstate(over="ignore"):
        expected = top + np.array(5, dtype) * top
    np.testing.assert_array_equal(call(client, "add", {"a": top, "b": top}, alpha=5), expected)


def test_float64_keeps_its_precision(client: httpx.Client) -> None:
    a, b = random_array("float64", (64,), 1), random_array("float64", (64,), 2)
    np.testing.assert_array_equal(call(client, "add", {"a": a, "b": b}), a + b)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_precisions_of_float32(client: httpx.Client, precision: str) -> None:
    arrays = {"a": random_array("float32", (32, 48), 1), "b": random_array("float32", (48, 16), 2)}
    check_matmul(client, arrays, "float32", precision=precision)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("shapes", [((), ()), ((1,), (1, 1)), ((5,), (7,)), ((5, 1), (1, 7))])
def test_fp8_scales(client: httpx.Client, dtype: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    arrays = {
        "a": random_array(dtype, (5, 32), 1),
        "b": random_array(dtype, (32, 7), 2),
        "a_scale": np.abs(random_array("float32", shapes[0], 3)) + np.float32(0.5),
        "b_scale": np.abs(random_array("float32", shapes[1], 4)) + np.float32(0.5),
    }
    check_matmul(client, arrays, "float32", out_dtype="float32")


def test_int8_with_an_int32_bias_is_exact(client: httpx.Client) -> None:
    arrays = {
        "a": random_array("int8", (9, 257), 1),
        "b": random_array("int8", (257, 5), 2),
        "bias": random_array("int32", (5,), 3),
    }
    check_matmul(client, arrays, "int32")


@pytest.mark.parametrize("dtype", MATMUL_DTYPES)
@pytest.mark.parametrize("mkn", [(3, 0, 4), (0, 5, 4), (3, 5, 0), (0, 0, 0)])
def test_zero_sizes_of_matmul(client: httpx.Client, dtype: str, mkn: tuple[int, int, int]) -> None:
    m, k, n = mkn
    check_matmul(client, {"a": random_array(dtype, (m, k)), "b": random_array(dtype, (k, n))}, matmul_out(dtype))


def test_an_empty_sum_still_gets_bias_and_activation(client: httpx.Client) -> None:
    arrays = {
        "a": np.zeros((2, 0), np.float32),
        "b": np.zeros((0, 3), np.float32),
        "bias": np.array([-1, 0, 2], np.float32),
    }
    out = call(client, "matmul", arrays, activation="leaky_relu")
    np.testing.assert_allclose(out, [[-0.01, 0, 2]] * 2, rtol=1e-6)


@pytest.mark.parametrize("form", NAMED)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
def test_zero_sizes_of_softmax_and_add(client: httpx.Client, form: str, shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    assert call(client, "softmax", {"x": x}, form).shape == shape
    assert call(client, "add", {"a": x, "b": x}, form).shape == shape


@pytest.mark.parametrize("rank", range(9))
def test_add_of_every_rank(client: httpx.Client, rank: int) -> None:
    shape = (2,) * rank
    a, b = random_array("float32", shape, 1), random_array("float32", shape, 2)
    np.testing.assert_array_equal(call(client, "add", {"a": a, "b": b}), a + b)


@pytest.mark.parametrize("rank", range(1, 9))
def test_softmax_of_every_rank_along_every_axis(client: httpx.Client, rank: int) -> None:
    x = random_array("float32", tuple(range(2, 2 + rank)) if rank < 5 else (2,) * rank)
    for axis in {-rank, 0, rank // 2, rank - 1, -1}:
        assert_close(call(client, "softmax", {"x": x}, axis=axis), *oracle.softmax(x, axis))


def test_nan_and_infinity_follow_the_mathematics(client: httpx.Client) -> None:
    nan, inf = np.nan, np.inf
    x = np.array([[-inf, -inf], [-inf, 0], [inf, 0], [nan, 0]], np.float32)
    np.testing.assert_array_equal(
        call(client, "softmax", {"x": x}), np.array([[nan, nan], [0, 1], [nan, nan], [nan, nan]], np.float32)
    )
    a = np.array([[inf, 1], [nan, 1], [1, 1]], np.float32)
    b = np.array([[1, 0], [1, 1]], np.float32)
    np.testing.assert_array_equal(
        call(client, "matmul", {"a": a, "b": b}), np.array([[inf, nan], [nan, nan], [2, 1]], np.float32)
    )
    np.testing.assert_array_equal(
        call(client, "matmul", {"a": a, "b": b}, activation="relu"),
        np.array([[inf, nan], [nan, nan], [2, 1]], np.float32),
    )
    np.testing.assert_array_equal(call(client, "add", {"a": a[0], "b": -a[0]}), np.array([nan, 0], np.float32))


def test_json_carries_nan_and_infinity_bare(client: httpx.Client) -> None:
    response = client.post(
        "/v1/add", content=b'{"a": [NaN, Infinity, -Infinity], "b": [1, 1, 1]}', headers={"content-type": TYPES["json"]}
    )
    assert response.status_code == 200
    assert b"[NaN,Infinity,-Infinity]" in response.content


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_over_the_range_become_infinite(client: httpx.Client, dtype: str) -> None:
    big = np.full((1, 1), 6e4 if dtype == "float16" else 3e38).astype(NUMPY[dtype])
    assert np.isposinf(call(client, "add", {"a": big, "b": big}).astype(np.float64)).all()


def test_deflated_npz(client: httpx.Client) -> None:
    arrays = {"a": random_array("float32", (64, 64), 1), "b": random_array("float32", (64, 64), 2)}
    response = client.post(
        "/v1/matmul", content=to_npz(arrays, is_deflated=True), headers={"content-type": TYPES["npz"]}
    )
    assert_close(decode(response.headers["content-type"], response.content), *oracle.matmul(arrays, {}))


def test_fortran_and_big_endian_arrays(client: httpx.Client) -> None:
    a, b = random_array("float32", (6, 4), 1), random_array("float32", (4, 5), 2)
    body = to_npz({"a": np.asfortranarray(a), "b": b.astype(">f4")})
    response = client.post("/v1/matmul", content=body, headers={"content-type": TYPES["npz"]})
    assert_close(decode(response.headers["content-type"], response.content), *oracle.matmul({"a": a, "b": b}, {}))


def test_formats_are_told_apart_by_their_first_bytes(client: httpx.Client) -> None:
    arrays = {"a": random_array("float32", (3, 3), 1), "b": random_array("float32", (3, 3), 2)}
    for form in NAMED:
        body, _ = encode(form, arrays)
        for headers in ({}, {"content-type": "application/octet-stream"}):
            response = client.post("/v1/add", content=body, headers=headers)
            assert response.status_code == 200, response.text
            assert response.headers["content-type"] == TYPES[form]
            np.testing.assert_array_equal(decode(TYPES[form], response.content), arrays["a"] + arrays["b"])
