"""The HTTP contract, row by row: statuses, headers, formats, options, names. Numbers are checked in integration."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.float64_oracle import random_array
from tests.raw_http import RawConnection, head, post
from tests.tensor_bodies import TYPES, decode, encode, from_safetensors, to_json, to_npy, to_npz, to_safetensors

Raw = Callable[[], RawConnection]

SAFETENSORS = {"content-type": TYPES["safetensors"]}
JSON = {"content-type": TYPES["json"]}
A = random_array("float32", (4, 3), 1)
B = random_array("float32", (3, 5), 2)
PRODUCT = to_safetensors({"a": A, "b": B})


def check_problem(response: httpx.Response, status: int, *named: str) -> dict[str, Any]:
    """RFC 9457, with the fields that the contract names, and a detail that names what is wrong."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem.keys() == {"type", "title", "status", "detail", "request_id"}
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    assert all(isinstance(problem[key], str) and problem[key] for key in ("type", "title", "detail"))
    for name in named:
        assert name in problem["detail"]
    assert not re.search(r"Traceback|\.py|0x[0-9a-f]{6,}|/tmp|/home|/usr", problem["detail"])
    return problem


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


def test_answer_headers(client: httpx.Client) -> None:
    response = client.post("/v1/matmul", content=PRODUCT, headers=SAFETENSORS)
    assert response.status_code == 200
    assert response.headers["x-batch-size"] == "1"
    stages = dict(entry.split(";dur=") for entry in response.headers["server-timing"].split(", "))
    assert stages.keys() <= {"receive", "queue", "h2d", "kernel", "d2h"}
    assert {"receive", "kernel"} <= stages.keys()
    assert all(float(spent_ms) >= 0 for spent_ms in stages.values())
    assert int(response.headers["content-length"]) == len(response.content)
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("path", ["/v1/matmul", "/v1/nothing", "/healthz", "/v1/tensors/none", "/nothing", "/metrics"])
def test_request_ids_are_echoed_on_every_answer(client: httpx.Client, path: str) -> None:
    response = client.get(path, headers={"x-request-id": "abc-123/x:y"})
    assert response.headers["x-request-id"] == "abc-123/x:y"


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "\x7f", "caf\xe9", "a\tb"])
def test_a_request_id_that_could_do_harm_is_replaced(raw: Raw, given: str) -> None:
    connection = raw()
    connection.send(head("GET", "/healthz", x_request_id=given))
    answer = connection.answer()
    if answer.status == 200:
        assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
    else:
        assert answer.status == 400


def test_a_request_id_cannot_start_another_header(raw: Raw) -> None:
    connection = raw()
    connection.send(b"GET /healthz HTTP/1.1\r\nhost: tests\r\nx-request-id: a\r\nset-cookie: b=c\r\n\r\n")
    answer = connection.answer()
    assert answer.headers["x-request-id"] == "a"
    assert "set-cookie" not in answer.headers


def test_a_megabyte_of_request_id_is_refused_and_the_next_request_is_served(raw: Raw, client: httpx.Client) -> None:
    connection = raw()
    connection.send(head("GET", "/healthz", x_request_id="x" * 2**20))
    answer = connection.answer()
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(answer.body) < 1000
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("form", ["safetensors", "npz", "json"])
def test_the_answer_is_in_the_format_of_the_request(client: httpx.Client, form: str) -> None:
    body, headers = encode(form, {"a": A, "b": B})
    response = client.post("/v1/matmul", content=body, headers=headers)
    assert response.headers["content-type"] == TYPES[form]
    np.testing.assert_allclose(decode(TYPES[form], response.content), A @ B, rtol=1e-5)


def test_npy_is_the_first_input_that_is_not_resident(client: httpx.Client) -> None:
    assert client.put("/v1/tensors/contract/b", content=to_npy(B)).status_code in (200, 201)
    response = client.post("/v1/matmul?b=@contract/b", content=to_npy(A), headers={"content-type": TYPES["npy"]})
    assert response.headers["content-type"] == TYPES["npy"]
    np.testing.assert_allclose(decode(TYPES["npy"], response.content), A @ B, rtol=1e-5)


def test_the_answer_tensor_is_called_out(client: httpx.Client) -> None:
    response = client.post("/v1/matmul", content=PRODUCT, headers=SAFETENSORS)
    assert from_safetensors(response.content).keys() == {"out"}
    response = client.post("/v1/matmul", content=to_json({"a": A, "b": B}), headers=JSON)
    assert response.json().keys() >= {"out"}


@pytest.mark.parametrize("asked", TYPES)
@pytest.mark.parametrize("sent", ["safetensors", "npz", "json"])
def test_accept_names_the_format_of_the_answer(client: httpx.Client, sent: str, asked: str) -> None:
    body, headers = encode(sent, {"a": A, "b": B})
    response = client.post("/v1/matmul", content=body, headers={**headers, "accept": TYPES[asked]})
    assert response.headers["content-type"] == TYPES[asked]
    np.testing.assert_allclose(decode(TYPES[asked], response.content), A @ B, rtol=1e-5)


def test_accept_with_qualities(client: httpx.Client) -> None:
    accept = "application/x-npz;q=0.2, application/json;q=0.9, text/html"
    response = client.post("/v1/matmul", content=PRODUCT, headers={**SAFETENSORS, "accept": accept})
    assert response.headers["content-type"] == TYPES["json"]


def test_accept_that_cannot_be_met_is_415(client: httpx.Client) -> None:
    response = client.post("/v1/matmul", content=PRODUCT, headers={**SAFETENSORS, "accept": "text/html"})
    check_problem(response, 415, "Accept")
    halves = to_safetensors({"a": random_array("bfloat16", (2, 2)), "b": random_array("bfloat16", (2, 2))})
    response = client.post("/v1/add", content=halves, headers={**SAFETENSORS, "accept": TYPES["npy"]})
    check_problem(response, 415, "bfloat16")


@pytest.mark.parametrize("content_type", ["application/vnd.safetensors", "application/x-safetensors; charset=binary"])
def test_other_names_of_safetensors(client: httpx.Client, content_type: str) -> None:
    response = client.post("/v1/matmul", content=PRODUCT, headers={"content-type": content_type})
    assert response.status_code == 200


# ── what cannot be right ──────────────────────────────────────────────────────────────────────────


def square(dtype: str = "float32", *shape: int) -> Any:
    return random_array(dtype, shape or (4, 4))


BAD_TENSORS: list[tuple[str, str, dict[str, Any], str]] = [
    ("matmul", "", {"a": square(), "b": square("float32", 5, 4)}, "b"),
    ("matmul", "?transpose_b=true", {"a": A, "b": B}, "b"),
    ("matmul", "", {"a": square()}, "b"),
    ("matmul", "", {"b": square()}, "a"),
    ("matmul", "", {"a": square(), "b": square(), "c": square()}, "c"),
    ("matmul", "", {"a": square("float32", 4), "b": square()}, "a"),
    ("matmul", "", {"a": square(), "b": square("float16")}, "b"),
    ("matmul", "", {"a": square("float64"), "b": square("float64")}, "a"),
    ("matmul", "", {"a": square("int32"), "b": square("int32")}, "a"),
    ("matmul", "", {"a": square("float32", 2, 4, 4), "b": square("float32", 3, 4, 4)}, "b"),
    ("matmul", "", {"a": square(), "b": square(), "bias": square("float32", 5)}, "bias"),
    ("matmul", "", {"a": square(), "b": square(), "bias": square("float64", 4)}, "bias"),
    ("matmul", "", {"a": square(), "b": square(), "a_scale": square("float32", 4)}, "a_scale"),
    (
        "matmul",
        "",
        {"a": square("float8_e5m2"), "b": square("float8_e5m2"), "a_scale": square("float32", 3)},
        "a_scale",
    ),
    ("matmul", "", {"a": square("float8_e5m2"), "b": square("float8_e4m3fn")}, "b"),
    ("matmul", "?out_dtype=int32", {"a": square(), "b": square()}, "out_dtype"),
    ("matmul", "?precision=tf32", {"a": square("float16"), "b": square("float16")}, "precision"),
    ("matmul", "?activation=gelu", {"a": square("int8"), "b": square("int8")}, "activation"),
    ("softmax", "", {"x": square("float32", 3), "y": square()}, "y"),
    ("softmax", "", {"x": np.array(1, np.float32)}, "x"),
    ("softmax", "", {"x": square("int8")}, "x"),
    ("softmax", "?axis=2", {"x": square()}, "axis"),
    ("softmax", "?axis=-3", {"x": square()}, "axis"),
    ("softmax", "?axis=99999999999999999999999", {"x": square()}, "axis"),
    ("add", "", {"a": square("float32", 3), "b": square("float32", 4)}, "b"),
    ("add", "", {"a": square("int8"), "b": square("int8")}, "a"),
    ("add", "?alpha=0.5", {"a": square("int32"), "b": square("int32")}, "alpha"),
    ("add", "?alpha=100000000000000000000000", {"a": square(), "b": square()}, "alpha"),
    ("add", "?alpha=-100000000000000000000000", {"a": square("int64"), "b": square("int64")}, "alpha"),
    ("add", "?alpha=9223372036854775808", {"a": square(), "b": square()}, "alpha"),
    ("add", "?out_dtype=int8", {"a": square("int32"), "b": square("int32")}, "out_dtype"),
]


@pytest.mark.parametrize(("op", "query", "arrays", "field"), BAD_TENSORS)
def test_tensors_that_cannot_be_right_are_400(
    client: httpx.Client, op: str, query: str, arrays: dict[str, Any], field: str
) -> None:
    response = client.post(f"/v1/{op}{query}", content=to_safetensors(arrays), headers=SAFETENSORS)
    problem = check_problem(response, 400, field)
    assert problem["detail"].startswith((f"{field}:", f"{field!r}:"))


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("activation=softplus", "activation"),
        ("transpose_a=maybe", "transpose_a"),
        ("out_dtype=float31", "out_dtype"),
        ("precision=tf33", "precision"),
        ("axis=0", "axis"),
        ("nonsense=1", "nonsense"),
        ("activation=relu&activation=gelu", "activation"),
        ("b=contract/b", "b"),
        ("b=@", "b"),
        ("b=@a//b", "b"),
        ("b=@../b", "b"),
        ("store=out", "store"),
        ("store=@a%20b", "store"),
        ("timeout_ms=-1", "timeout_ms"),
        ("timeout_ms=nan", "timeout_ms"),
        ("timeout_ms=soon", "timeout_ms"),
        ("a=%ff", "query"),
        ("&".join(f"p{number}=1" for number in range(65)), "query"),
    ],
)
def test_queries_that_cannot_be_right_are_400(client: httpx.Client, query: str, field: str) -> None:
    response = client.post(f"/v1/matmul?{query}", content=PRODUCT, headers=SAFETENSORS)
    check_problem(response, 400, field)


@pytest.mark.parametrize("value", ["", "-5", "0", "abc", "1e99", "inf"])
def test_timeout_headers_that_cannot_be_right_are_400(client: httpx.Client, value: str) -> None:
    response = client.post("/v1/matmul", content=PRODUCT, headers={**SAFETENSORS, "x-timeout-ms": value})
    check_problem(response, 400, "X-Timeout-Ms")


def bad_bodies() -> list[Any]:
    whole = PRODUCT
    header = int.from_bytes(whole[:8], "little")
    objects = np.array([{}, []], dtype=object)
    cases = {
        "truncated safetensors": (TYPES["safetensors"], whole[:-1]),
        "trailing byte": (TYPES["safetensors"], whole + b"x"),
        "header length beyond the body": (TYPES["safetensors"], (2**40).to_bytes(8, "little") + whole[8:]),
        "header length of 2^64-1": (TYPES["safetensors"], b"\xff" * 8 + whole[8:]),
        "header cut": (TYPES["safetensors"], whole[: 8 + header // 2]),
        "no header": (TYPES["safetensors"], b"\x00" * 8),
        "seven bytes": (TYPES["safetensors"], b"\x01" * 7),
        "empty safetensors": (TYPES["safetensors"], b""),
        "unknown dtype": (TYPES["safetensors"], whole.replace(b"F32", b"F99", 1)),
        "unsigned dtype": (TYPES["safetensors"], whole.replace(b"F32", b"U32", 1)),
        "object npy": (TYPES["npy"], to_npy(objects)),
        "structured npy": (TYPES["npy"], to_npy(np.zeros(2, [("x", "f4")]))),
        "complex npy": (TYPES["npy"], to_npy(np.zeros(2, np.complex64))),
        "truncated npy": (TYPES["npy"], to_npy(A)[:-1]),
        "npy that is none": (TYPES["npy"], b"hello"),
        "truncated npz": (TYPES["npz"], to_npz({"a": A, "b": B})[:-10]),
        "npz of an object": (TYPES["npz"], to_npz({"a": objects})),
        "JSON that is a list": (TYPES["json"], b"[1, 2]"),
        "JSON cut off": (TYPES["json"], b'{"a": [[1, 2'),
        "JSON nested deep": (TYPES["json"], b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "JSON ragged": (TYPES["json"], b'{"a": [[1, 2], [3]], "b": [[1]]}'),
        "JSON with text": (TYPES["json"], b'{"a": [["1"]], "b": [[1]]}'),
        "JSON twice the same": (TYPES["json"], b'{"a": [[1]], "a": [[1]], "b": [[1]]}'),
        "JSON of a huge number": (TYPES["json"], b'{"a": [[' + b"9" * 5000 + b']], "b": [[1]]}'),
        "JSON unknown dtype": (TYPES["json"], b'{"a": [[1]], "b": [[1]], "dtype": "float31"}'),
        "JSON with a BOM": (TYPES["json"], b'\xef\xbb\xbf{"a": [[1]]}'),
    }
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize(("content_type", "body"), bad_bodies())
def test_bodies_that_cannot_be_right_are_400(client: httpx.Client, content_type: str, body: bytes) -> None:
    check_problem(client.post("/v1/matmul", content=body, headers={"content-type": content_type}), 400)
    assert client.post("/v1/matmul", content=PRODUCT, headers=SAFETENSORS).status_code == 200


@pytest.mark.parametrize("body", [b"hello, world", b"", b"\x89PNG\r\n\x1a\n", b"<html>"])
@pytest.mark.parametrize("content_type", [None, "text/html", "application/octet-stream"])
def test_bodies_in_no_known_format_are_415(client: httpx.Client, content_type: str | None, body: bytes) -> None:
    headers = {"content-type": content_type} if content_type else {}
    check_problem(client.post("/v1/matmul", content=body, headers=headers), 415, "safetensors", "npz", "npy", "json")


def test_content_encodings_are_415(client: httpx.Client) -> None:
    response = client.post("/v1/matmul", content=PRODUCT, headers={**SAFETENSORS, "content-encoding": "gzip"})
    check_problem(response, 415, "Content-Encoding")


# ── paths, methods, lengths ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/conv", "/v1/MATMUL", "/v1/matmul%00"])
def test_no_such_op_is_404(client: httpx.Client, path: str) -> None:
    check_problem(client.post(path, content=PRODUCT, headers=SAFETENSORS), 404)


@pytest.mark.parametrize("path", ["/nothing", "/v1/", "/v1/matmul/x", "/v3/models"])
def test_no_such_path_is_404(client: httpx.Client, path: str) -> None:
    check_problem(client.get(path), 404)


def test_errors_under_v2_have_the_protocols_form(client: httpx.Client) -> None:
    response = client.get("/v2/nothing")
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/matmul", {"POST"}),
        ("PUT", "/v1/softmax", {"POST"}),
        ("DELETE", "/v1/add", {"POST"}),
        ("POST", "/v1/tensors", {"GET"}),
        ("DELETE", "/v1/tensors", {"GET"}),
        ("POST", "/v1/tensors/x", {"GET", "HEAD", "PUT", "DELETE"}),
        ("PATCH", "/v1/tensors/x/y", {"GET", "HEAD", "PUT", "DELETE"}),
        ("POST", "/metrics", {"GET"}),
        ("DELETE", "/readyz", {"GET", "HEAD"}),
    ],
)
def test_other_methods_are_405_and_say_which_are_allowed(
    client: httpx.Client, method: str, path: str, allowed: set[str]
) -> None:
    response = client.request(method, path)
    check_problem(response, 405, "method")
    assert set(response.headers["allow"].split(", ")) == allowed


def test_neither_length_nor_chunks_is_411(raw: Raw) -> None:
    connection = raw()
    connection.send(head("POST", "/v1/matmul"))
    answer = connection.answer()
    assert answer.status == 411
    assert answer.json()["detail"].startswith("Content-Length")
    connection.send(post("/v1/matmul", PRODUCT))
    assert connection.answer().status == 200


def test_over_max_body_bytes_is_413_before_the_body(raw: Raw) -> None:
    connection = raw()
    connection.send(head("POST", "/v1/matmul", content_length=str(16 * 2**20 + 1)))
    answer = connection.answer()
    assert answer.status == 413
    assert str(16 * 2**20) in answer.json()["detail"]


def test_chunks_over_max_body_bytes_are_413(client: httpx.Client) -> None:
    response = client.post("/v1/matmul", content=(bytes(2**20) for _ in range(17)), headers=SAFETENSORS)
    check_problem(response, 413)


def test_an_npz_that_inflates_past_the_limit_is_413(client: httpx.Client) -> None:
    bomb = to_npz({"a": np.zeros((17, 2**18), np.float32)}, is_deflated=True)
    check_problem(client.post("/v1/matmul", content=bomb, headers={"content-type": TYPES["npz"]}), 413)


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


def test_results_over_the_limit_are_422(client: httpx.Client) -> None:
    tall = {"a": np.zeros((2**12, 1), np.float32), "b": np.zeros((1, 2**12), np.float32)}
    check_problem(client.post("/v1/add", content=to_safetensors(tall), headers=SAFETENSORS), 422, "out")
    check_problem(client.post("/v1/matmul", content=to_safetensors(tall), headers=SAFETENSORS), 422, "out")


def test_ranks_over_the_limit_are_422(client: httpx.Client) -> None:
    deep = np.zeros((1,) * 9, np.float32)
    check_problem(client.post("/v1/softmax", content=to_safetensors({"x": deep}), headers=SAFETENSORS), 422, "x")


def shaped(*shape: int) -> bytes:
    header = (
        f'{{"x": {{"dtype": "F32", "shape": {list(shape)}, "data_offsets": [0, 0]}},'
        f'"a": {{"dtype": "F32", "shape": {list(shape)}, "data_offsets": [0, 0]}},'
        f'"b": {{"dtype": "F32", "shape": {list(shape)}, "data_offsets": [0, 0]}}}}'
    ).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (0, 2**62, 2**62), (2**62, 0, 2**62), (0, 2**63 - 1)])
def test_huge_dimensions_beside_a_zero_are_422(client: httpx.Client, shape: tuple[int, ...]) -> None:
    body = to_safetensors({"x": np.zeros(0, np.float32)}).replace(b'"shape": [0]', f'"shape": {list(shape)}'.encode())
    header = body[8:]
    body = len(header).to_bytes(8, "little") + header
    check_problem(client.post("/v1/softmax", content=body, headers=SAFETENSORS), 422, "x")


def test_products_of_dimensions_do_not_wrap(client: httpx.Client) -> None:
    header = b'{"x": {"dtype": "F32", "shape": [4, 1152921504606846978], "data_offsets": [0, 32]}}'
    body = len(header).to_bytes(8, "little") + header + bytes(32)
    check_problem(client.post("/v1/softmax", content=body, headers=SAFETENSORS), 400, "x")


def test_int8_that_could_overflow_is_422(client: httpx.Client) -> None:
    arrays = {"a": np.zeros((1, 133_001), np.int8), "b": np.zeros((133_001, 1), np.int8)}
    check_problem(client.post("/v1/matmul", content=to_safetensors(arrays), headers=SAFETENSORS), 422, "a")


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────

DESCRIPTION = {"name", "shape", "dtype", "bytes", "created", "last_used", "hits"}


def test_the_life_of_a_resident_tensor(client: httpx.Client) -> None:
    url = "/v1/tensors/contract/life"
    check_problem(client.get(url), 404, "contract/life")
    assert client.head(url).status_code == 404
    check_problem(client.delete(url), 404, "contract/life")

    response = client.put(url, content=to_npy(A))
    assert response.status_code == 201
    description = response.json()
    assert description.keys() == DESCRIPTION
    assert description["name"] == "contract/life"
    assert description["shape"] == [4, 3]
    assert description["dtype"] == "float32"
    assert description["bytes"] == 48
    assert description["hits"] == 0
    assert description["last_used"] is None

    response = client.put(url, content=to_safetensors({"anything": B}), headers=SAFETENSORS)
    assert response.status_code == 200
    assert response.json()["shape"] == [3, 5]

    response = client.head(url)
    assert response.status_code == 200
    assert response.content == b""
    assert response.headers["x-tensor-name"] == "contract/life"
    assert response.headers["x-tensor-dtype"] == "float32"
    assert response.headers["x-tensor-shape"] == "3,5"
    assert response.headers["x-tensor-bytes"] == "60"

    response = client.post("/v1/matmul?b=@contract/life", content=to_safetensors({"a": A}), headers=SAFETENSORS)
    np.testing.assert_allclose(decode(TYPES["safetensors"], response.content), A @ B, rtol=1e-5)
    (listed,) = (one for one in client.get("/v1/tensors").json() if one["name"] == "contract/life")
    assert listed.keys() == DESCRIPTION
    assert listed["hits"] == 1
    assert listed["last_used"] >= listed["created"]

    response = client.delete(url)
    assert response.status_code == 204
    assert response.content == b""
    assert client.head(url).status_code == 404
    response = client.post("/v1/matmul?b=@contract/life", content=to_safetensors({"a": A}), headers=SAFETENSORS)
    check_problem(response, 404, "b:", "contract/life")


def test_get_in_npy_or_safetensors_by_accept(client: httpx.Client) -> None:
    url = "/v1/tensors/contract/get"
    client.put(url, content=to_npy(A))
    response = client.get(url, headers={"accept": TYPES["npy"]})
    assert response.headers["content-type"] == TYPES["npy"]
    np.testing.assert_array_equal(decode(TYPES["npy"], response.content), A)
    response = client.get(url, headers={"accept": TYPES["safetensors"]})
    (array,) = from_safetensors(response.content).values()
    np.testing.assert_array_equal(array, A)
    assert client.get(url).headers["content-type"] == TYPES["safetensors"]


def test_bfloat16_is_got_as_safetensors_only(client: httpx.Client) -> None:
    url = "/v1/tensors/contract/bf16"
    array = random_array("bfloat16", (3, 3))
    client.put(url, content=to_safetensors({"w": array}), headers=SAFETENSORS)
    (got,) = from_safetensors(client.get(url).content).values()
    np.testing.assert_array_equal(got, array)
    check_problem(client.get(url, headers={"accept": TYPES["npy"]}), 415, "bfloat16")


def test_put_of_an_npz_with_one_array(client: httpx.Client) -> None:
    assert client.put("/v1/tensors/contract/npz", content=to_npz({"w": A})).status_code in (200, 201)
    (got,) = from_safetensors(client.get("/v1/tensors/contract/npz").content).values()
    np.testing.assert_array_equal(got, A)


@pytest.mark.parametrize("body", [to_safetensors({"a": A, "b": B}), to_npz({"a": A, "b": B}), to_safetensors({})])
def test_put_of_other_than_one_tensor_is_400(client: httpx.Client, body: bytes) -> None:
    check_problem(client.put("/v1/tensors/contract/two", content=body), 400, "exactly one")
    assert client.head("/v1/tensors/contract/two").status_code == 404


@pytest.mark.parametrize("name", ["a", "A-z_0.9/b", "x" * 255, "deep/er/and/deep.er", "...", "-", "%61"])
def test_names_that_may_be(client: httpx.Client, name: str) -> None:
    assert client.put(f"/v1/tensors/{name}", content=to_npy(A)).status_code in (200, 201)
    assert client.head(f"/v1/tensors/{name}").status_code == 200
    assert client.delete(f"/v1/tensors/{name}").status_code == 204


@pytest.mark.parametrize(
    "name", ["x" * 256, "a%20b", "a//b", "a/", "%2Fa", "a/%2e%2e/b", "%2e%2e", "caf%C3%A9", "a%00", "@a", "a:b"]
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_names_that_may_not_be_are_400(raw: Raw, name: str, method: str) -> None:
    connection = raw()
    body = to_npy(A) if method == "PUT" else b""
    connection.send(head(method, f"/v1/tensors/{name}", content_length=str(len(body))) + body)
    answer = connection.answer()
    assert answer.status == 400
    assert answer.json()["detail"].startswith("name")


def test_store_keeps_the_result_and_answers_201(client: httpx.Client) -> None:
    client.delete("/v1/tensors/contract/stored")
    response = client.post("/v1/matmul?store=@contract/stored", content=PRODUCT, headers=SAFETENSORS)
    assert response.status_code == 201
    description = response.json()
    assert description.keys() == DESCRIPTION
    assert description["shape"] == [4, 5]
    assert "server-timing" in response.headers
    (got,) = from_safetensors(client.get("/v1/tensors/contract/stored").content).values()
    np.testing.assert_allclose(got, A @ B, rtol=1e-5)
    response = client.post("/v1/softmax?x=@contract/stored&store=@contract/stored")
    assert response.status_code == 201
    assert client.post("/v1/softmax?x=@contract/stored").status_code == 200


def test_an_input_twice_is_400(client: httpx.Client) -> None:
    client.put("/v1/tensors/contract/b", content=to_npy(B))
    response = client.post("/v1/matmul?b=@contract/b", content=PRODUCT, headers=SAFETENSORS)
    check_problem(response, 400, "b:")


def test_the_quota_of_residents_is_507_and_nothing_is_evicted(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB", "--resident-bytes", "100")
    with server.client() as client:
        assert client.put("/v1/tensors/a", content=to_npy(A)).status_code == 201
        assert client.put("/v1/tensors/b", content=to_npy(A)).status_code == 201
        check_problem(client.put("/v1/tensors/c", content=to_npy(A)), 507, "c")
        check_problem(client.put("/v1/tensors/a", content=to_npy(np.zeros(25, np.float32))), 507, "a")
        response = client.post("/v1/matmul?store=@out", content=PRODUCT, headers=SAFETENSORS)
        check_problem(response, 507, "out")
        assert {one["name"] for one in client.get("/v1/tensors").json()} == {"a", "b"}
        assert client.put("/v1/tensors/a", content=to_npy(A[:2])).status_code == 200
        assert client.delete("/v1/tensors/b").status_code == 204
        assert client.put("/v1/tensors/c", content=to_npy(A)).status_code == 201


def test_tensors_dir_is_loaded_before_ready(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tensors")
    half = random_array("bfloat16", (2, 3))
    (folder / "model.safetensors").write_bytes(
        to_safetensors({"w": B, "half": half, "empty": np.zeros((0, 3), np.int8)})
    )
    (folder / "notes.txt").write_text("not a tensor")
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB", "--tensors-dir", str(folder))
    with server.client() as client:
        names = {one["name"] for one in client.get("/v1/tensors").json()}
        assert names == {"model/w", "model/half", "model/empty"}
        (got,) = from_safetensors(client.get("/v1/tensors/model/half").content).values()
        np.testing.assert_array_equal(got, half)
        response = client.post("/v1/matmul?b=@model/w", content=to_safetensors({"a": A}), headers=SAFETENSORS)
        np.testing.assert_allclose(decode(TYPES["safetensors"], response.content), A @ B, rtol=1e-5)


# ── health, documents ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "key"),
    [("/healthz", "live"), ("/v2/health/live", "live"), ("/readyz", "ready"), ("/v2/health/ready", "ready")],
)
def test_health(client: httpx.Client, path: str, key: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.json() == {key: True}


def test_v2_says_which_backend_runs(client: httpx.Client) -> None:
    answer = client.get("/v2").json()
    assert answer["name"] == "tilewire"
    assert isinstance(answer["extensions"], list)
    assert answer["engines"][0]["backend"] == "cpu"


def test_the_openapi_document_names_every_op_and_option(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for op, options in {
        "matmul": {"transpose_a", "transpose_b", "activation", "out_dtype", "precision", "a", "b", "bias"},
        "softmax": {"axis", "out_dtype", "log", "x"},
        "add": {"alpha", "out_dtype", "a", "b"},
    }.items():
        parameters = {one["name"] for one in document["paths"][f"/v1/{op}"]["post"]["parameters"]}
        assert options | {"store", "timeout_ms"} <= parameters
    assert {"get", "put", "head", "delete"} <= document["paths"]["/v1/tensors/{name}"].keys()


def test_docs_and_the_root_are_pages(client: httpx.Client) -> None:
    assert "text/html" in client.get("/docs").headers["content-type"]
    assert client.get("/", follow_redirects=True).status_code == 200
