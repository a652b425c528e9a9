"""`/v2` as its clients see it: what each call answers, in JSON and in binary."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.exposition import check_left_idle
from tests.support.float64_oracle import assert_close, matmul, random_array, softmax
from tests.support.live_server import BACKEND
from tests.support.oip_bodies import LENGTH, binary_input, from_answer, text_input, to_binary, to_text
from tests.support.problems import check_error
from tests.support.raw_http import RawConnection, post
from tests.support.tensor_bodies import NUMPY, Array, to_npy
from tilewire.service.ops.registry import OPS

Raw = Callable[[], RawConnection]

A = random_array("float32", (4, 3), 1)
B = random_array("float32", (3, 5), 2)
MATMUL, SOFTMAX, ADD = (f"/v2/models/{name}/infer" for name in ("matmul", "softmax", "add"))
# The HTTP library would accept codings by itself; a bare client does not.
PLAIN = {"accept-encoding": "identity"}

Coder = Callable[[bytes], bytes]
COMPRESS: dict[str | None, Coder] = {None: bytes, "gzip": gzip.compress, "deflate": zlib.compress}
DECOMPRESS: dict[str | None, Coder] = {None: bytes, "gzip": gzip.decompress, "deflate": zlib.decompress}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(client: httpx.Client) -> Iterator[None]:
    yield
    check_left_idle(client)


def infer(
    client: httpx.Client, model: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[dict[str, Any], Array]:
    response = client.post(f"/v2/models/{model}/infer", content=body, headers={**PLAIN, **(headers or {})})
    assert response.status_code == 200, response.text
    is_binary = LENGTH in response.headers
    assert response.headers["content-type"] == ("application/octet-stream" if is_binary else "application/json")
    return from_answer(response.content, response.headers.get(LENGTH))


# ── what is told of the server and its models ─────────────────────────────────────────────────────


def test_server_metadata(client: httpx.Client) -> None:
    server = client.get("/v2").json()
    assert server["name"] == "tilewire"
    assert {"binary_tensor_data", "parameters", "statistics", "schedule_policy", "model_repository"} <= set(
        server["extensions"]
    )
    assert server["engines"][0]["backend"] == BACKEND


@pytest.mark.parametrize("version", ["", "/versions/1"])
@pytest.mark.parametrize("model", OPS)
def test_metadata_and_configuration_agree(client: httpx.Client, model: str, version: str) -> None:
    metadata = client.get(f"/v2/models/{model}{version}").json()
    config = client.get(f"/v2/models/{model}{version}/config").json()
    assert (metadata["name"], metadata["versions"], config["name"]) == (model, ["1"], model)
    assert config["max_batch_size"] == 0
    for told, configured in (("inputs", "input"), ("outputs", "output")):
        assert [one["name"] for one in metadata[told]] == [one["name"] for one in config[configured]]
        for one, other in zip(metadata[told], config[configured], strict=True):
            assert other["data_type"] == f"TYPE_{one['datatype']}"
            assert other["dims"] == one["shape"]
    assert [one["name"] for one in metadata["inputs"]] == list(OPS[model].required)
    assert metadata["parameters"]["options"].split() == list(OPS[model].options.__struct_fields__)
    ready = client.get(f"/v2/models/{model}{version}/ready")
    assert (ready.status_code, ready.json()) == (200, {"name": model, "ready": True})


def test_repository_index(client: httpx.Client) -> None:
    # With the content type that the C++ client's empty POST has.
    form = {"content-type": "application/x-www-form-urlencoded", "content-length": "0"}
    # Programs of other tests may be there.
    names = [*OPS, *(program["name"] for program in client.get("/v1/programs").json())]
    for options in ({"headers": form}, {"content": b""}, {"content": b'{"ready": true}'}):
        response = client.post("/v2/repository/index", **options)
        assert response.status_code == 200
        assert response.json() == [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in names]


@pytest.mark.parametrize("body", [b'{"ready": 1}', b'{"ready": [true]}', b"[]", b"{"])
def test_a_repository_index_that_cannot_be_right(client: httpx.Client, body: bytes) -> None:
    response = client.post("/v2/repository/index", content=body)
    assert (response.status_code, response.json()["error"][:5]) == (400, "ready")


def test_other_spellings_of_the_letters_are_the_same_path(raw: Raw) -> None:
    connection = raw()
    connection.send(post("/%762/models/%6Datmul/infer", to_text({"a": A, "b": B})))
    assert connection.answer().status == 200


def test_the_openapi_document_has_the_calls(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for path in ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"):
        assert "application/octet-stream" in paths[path]["post"]["requestBody"]["content"]
        assert paths[path]["post"]["parameters"][0]["name"] == "model"
    example = paths["/v2/models/{model}/infer"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert client.post(MATMUL, json=example).status_code == 200


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


def bodies_of(arrays: dict[str, Array], **members: Any) -> Iterator[tuple[bytes, dict[str, str]]]:
    """The same request in binary and in JSON, as far as JSON holds it."""
    yield to_binary(arrays, **members)
    if not any(array.dtype.name.startswith("float8") for array in arrays.values()):
        yield to_text(arrays, **members), {}


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("dtype", OPS["matmul"].dtypes)
def test_matmul(client: httpx.Client, dtype: str, is_binary: bool) -> None:
    arrays = {"a": random_array(dtype, (5, 7), 1), "b": random_array(dtype, (9, 7), 2)}
    options: dict[str, Any] = {"transpose_b": True}
    if dtype != "int8":
        arrays["bias"] = random_array("float32", (9,), 3)
        options |= {"activation": "gelu", "out_dtype": "FP32"}
    for body, headers in bodies_of(arrays, id="7", parameters={**options, "binary_data_output": is_binary}):
        answer, out = infer(client, "matmul", body, headers)
        assert (answer["id"], answer["model_name"], answer["model_version"]) == ("7", "matmul", "1")
        assert out.dtype == NUMPY["int32" if dtype == "int8" else "float32"]
        assert_close(out, *matmul(arrays, options))


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("dtype", OPS["softmax"].dtypes)
def test_softmax(client: httpx.Client, dtype: str, is_binary: bool) -> None:
    x = random_array(dtype, (3, 4, 5), 1)
    options = {"axis": 1, "log": True}
    for body, headers in bodies_of({"x": x}, parameters={**options, "binary_data_output": is_binary}):
        answer, out = infer(client, "softmax", body, headers)
        assert "id" not in answer
        assert_close(out, *softmax(x, 1, log=True))


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("dtype", OPS["add"].dtypes)
def test_add(client: httpx.Client, dtype: str, is_binary: bool) -> None:
    a, b = random_array(dtype, (2, 3), 1), random_array(dtype, (3,), 2)
    for body, headers in bodies_of({"a": a, "b": b}, parameters={"alpha": 2, "binary_data_output": is_binary}):
        _, out = infer(client, "add", body, headers)
        assert out.dtype == a.dtype
        slack = 2**-7 if dtype == "bfloat16" else 2**-10
        expected = a.astype(np.float64) + 2 * b.astype(np.float64)
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=slack, atol=slack)


@pytest.mark.parametrize("rank", range(9))
def test_every_rank(client: httpx.Client, rank: int) -> None:
    a = np.arange(2**rank, dtype=np.float32).reshape((2,) * rank)
    for body, headers in bodies_of({"a": a, "b": a}):
        _, out = infer(client, "add", body, headers)
        np.testing.assert_array_equal(out, 2 * a)
        assert out.shape == a.shape


def test_nested_data(client: httpx.Client) -> None:
    body = json.dumps({"inputs": [text_input(name, one, is_nested=True) for name, one in (("a", A), ("b", B))]})
    _, out = infer(client, "matmul", body.encode())
    assert_close(out, *matmul({"a": A, "b": B}, {}))


def test_nan_and_infinity_travel_as_text(client: httpx.Client) -> None:
    body = (
        b'{"inputs": [{"name": "a", "datatype": "FP16", "shape": [4], "data": [NaN, Infinity, -Infinity, 1]}, '
        b'{"name": "b", "datatype": "FP16", "shape": [1], "data": [0]}]}'
    )
    response = client.post(ADD, content=body)
    assert b'"data":[NaN,Infinity,-Infinity,1.0]' in response.content


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("wants_binary", [True, False])
def test_zero_sizes(client: httpx.Client, is_binary: bool, wants_binary: bool) -> None:
    arrays = {"a": np.zeros((0, 3), np.float32), "b": B}
    parameters = {"binary_data_output": wants_binary}
    body, headers = (
        to_binary(arrays, parameters=parameters) if is_binary else (to_text(arrays, parameters=parameters), {})
    )
    answer, out = infer(client, "matmul", body, headers)
    assert out.shape == (0, 5)
    assert answer["outputs"][0].get("parameters") == ({"binary_data_size": 0} if wants_binary else None)
    # K = 0: zeros, and something to send.
    arrays = {"a": np.zeros((2, 0), np.float32), "b": np.zeros((0, 3), np.float32)}
    body, headers = to_binary(arrays, parameters=parameters)
    _, out = infer(client, "matmul", body, headers)
    np.testing.assert_array_equal(out, np.zeros((2, 3)))


@pytest.mark.parametrize("is_binary", [True, False])
def test_null_is_as_good_as_nothing(client: httpx.Client, is_binary: bool) -> None:
    """Members that a client's own classes write, whether they are set or not."""
    arrays = {"a": A, "b": B}
    if is_binary:
        inputs = [{"data": None} | binary_input(name, array) for name, array in arrays.items()]
    else:
        inputs = [{"parameters": None} | text_input(name, array) for name, array in arrays.items()]
    unset = {"id": None, "parameters": None, "outputs": [{"name": "out", "parameters": None}]}
    header = json.dumps({"inputs": inputs, **unset}).encode()
    body = b"".join(array.tobytes() for array in arrays.values()) if is_binary else b""
    _, out = infer(client, "matmul", header + body, {LENGTH: str(len(header))} if is_binary else {})
    assert_close(out, *matmul(arrays, {}))


def test_a_raw_body_is_a_float32_vector(client: httpx.Client) -> None:
    x = random_array("float32", (6,), 1)
    answer, out = infer(client, "softmax", x.tobytes(), {LENGTH: "0"})
    assert answer["outputs"][0]["parameters"] == {"binary_data_size": 24}
    assert_close(out, *softmax(x))


def test_the_output_may_be_asked_for_in_either_form(client: httpx.Client) -> None:
    for is_binary in (True, False):
        outputs = [{"name": "out", "parameters": {"binary_data": is_binary}}]
        body, headers = to_binary({"x": A}, outputs=outputs, parameters={"binary_data_output": not is_binary})
        answer, out = infer(client, "softmax", body, headers)
        assert ("data" in answer["outputs"][0]) is not is_binary
        assert_close(out, *softmax(A))


def test_the_headers_of_v1_are_there(client: httpx.Client) -> None:
    body, headers = to_binary({"x": A})
    response = client.post(SOFTMAX, content=body, headers={**headers, "x-request-id": "abc"})
    assert response.headers["x-request-id"] == "abc"
    assert response.headers["x-batch-size"] == "1"
    assert "kernel;dur=" in response.headers["server-timing"]


def test_residents(client: httpx.Client) -> None:
    client.put("/v1/tensors/oip/b", content=to_npy(B)).raise_for_status()
    typed = {"name": "b", "datatype": "FP32", "shape": [3, 5], "parameters": {"resident": "oip/b"}}
    untyped = {"name": "b", "parameters": {"resident": "oip/b"}}
    for document in (
        {"inputs": [binary_input("a", A), typed]},
        {"inputs": [untyped, binary_input("a", A)]},
        {"inputs": [binary_input("a", A)], "parameters": {"b": "@oip/b"}},
    ):
        header = json.dumps(document).encode()
        _, out = infer(client, "matmul", header + A.tobytes(), {LENGTH: str(len(header))})
        assert_close(out, *matmul({"a": A, "b": B}, {}))
    wrong = {**typed, "shape": [5, 3]}
    header = json.dumps({"inputs": [binary_input("a", A), wrong]}).encode()
    response = client.post(MATMUL, content=header + A.tobytes(), headers={LENGTH: str(len(header))})
    check_error(response, 400, "b:", "float32[3, 5]")
    header = json.dumps({"inputs": [binary_input("a", A)], "parameters": {"b": "@oip/none"}}).encode()
    response = client.post(MATMUL, content=header + A.tobytes(), headers={LENGTH: str(len(header))})
    check_error(response, 404, "b:", "oip/none")


# ── codings ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("answer_coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("is_binary", [True, False])
def test_codings_both_ways(raw: Raw, coding: str | None, answer_coding: str | None, is_binary: bool) -> None:
    x = random_array("float32", (64, 64), 1)
    parameters = {"binary_data_output": is_binary}
    body, headers = (
        to_binary({"x": x}, parameters=parameters) if is_binary else (to_text({"x": x}, parameters=parameters), {})
    )
    body = COMPRESS[coding](body)
    if coding is not None:
        headers["content-encoding"] = coding
    if answer_coding is not None:
        headers["accept-encoding"] = answer_coding
    connection = raw()
    connection.send(post(SOFTMAX, body, **{name.replace("-", "_"): value for name, value in headers.items()}))
    answer = connection.answer()
    assert answer.status == 200
    assert answer.headers.get("content-encoding") == answer_coding
    _, out = from_answer(DECOMPRESS[answer_coding](answer.body), answer.headers.get(LENGTH.lower()))
    assert_close(out, *softmax(x))


def test_a_list_of_codings_compresses_text_only(client: httpx.Client) -> None:
    x = random_array("float32", (64, 64), 1)
    habit = {"accept-encoding": "gzip, deflate, br"}
    body, headers = to_binary({"x": x}, parameters={"binary_data_output": True})
    assert "content-encoding" not in client.post(SOFTMAX, content=body, headers={**headers, **habit}).headers
    response = client.post(SOFTMAX, content=to_text({"x": x}), headers=habit)
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["vary"] == "accept-encoding"
    assert_close(from_answer(response.content, None)[1], *softmax(x))


def test_a_bomb_is_413(client: httpx.Client) -> None:
    bomb = gzip.compress(bytes(2**28))
    response = client.post(SOFTMAX, content=bomb, headers={"content-encoding": "gzip", LENGTH: "0"})
    check_error(response, 413, "inflates")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "body", [b"", b"nonsense", gzip.compress(b"{}", mtime=0)[:-3], gzip.compress(b"{}", mtime=0) + b"x"]
)
def test_streams_that_are_none_are_400(client: httpx.Client, coding: str, body: bytes) -> None:
    check_error(client.post(SOFTMAX, content=body, headers={"content-encoding": coding}), 400, coding)


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "zstd"])
def test_other_codings_are_415(client: httpx.Client, coding: str) -> None:
    response = client.post(SOFTMAX, content=to_text({"x": A}), headers={"content-encoding": coding})
    check_error(response, 415, "Content-Encoding")
