"""Requests that cannot be right: each is 400 or 415 with a detail that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.float64_oracle import random_array
from tests.support.problems import check_problem
from tests.support.raw_http import RawConnection
from tests.support.tensor_bodies import TYPES, to_npy, to_npz, to_safetensors

Raw = Callable[[], RawConnection]

SAFETENSORS = {"content-type": TYPES["safetensors"]}
NPY = {"content-type": TYPES["npy"]}
JSON = {"content-type": TYPES["json"]}
A = random_array("float32", (4, 3), 1)
B = random_array("float32", (3, 5), 2)
PRODUCT = to_safetensors({"a": A, "b": B})


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
    ("add", "?alpha=1e999", {"a": square(), "b": square()}, "alpha"),
    ("add", "?alpha=9223372036854775808", {"a": square(), "b": square()}, "alpha"),
    ("add", "?out_dtype=int8", {"a": square("int32"), "b": square("int32")}, "out_dtype"),
]


@pytest.mark.parametrize(("op", "query", "arrays", "field"), BAD_TENSORS)
def test_tensors_that_cannot_be_right_are_400(
    client: httpx.Client, op: str, query: str, arrays: dict[str, Any], field: str
) -> None:
    response = client.post(f"/v1/{op}{query}", content=to_safetensors(arrays), headers=SAFETENSORS)
    problem = check_problem(response, 400, field)
    assert problem["detail"].startswith(f"{field}:")


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
        ("timeout_ms=", "timeout_ms"),
        ("timeout_ms=1_000", "timeout_ms"),
        ("timeout_ms=%201000", "timeout_ms"),
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


@pytest.mark.parametrize("path", ["v1/matmul%0A", "v1/run%0A", "v1/mat%0Amul", "healthz%0A"])
def test_line_breaks_in_a_path_are_400(client: httpx.Client, path: str) -> None:
    check_problem(client.post(f"/{path}", content=PRODUCT, headers=SAFETENSORS), 400, "path")


@pytest.mark.parametrize("path", ["v2/models/matmul/infer%0A", "v2/models/matmul%0A/infer"])
def test_line_breaks_in_a_path_of_v2_are_400(client: httpx.Client, path: str) -> None:
    response = client.post(f"/{path}", content=b"{}")
    assert (response.status_code, response.json().keys()) == (400, {"error"})


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


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (TYPES["json"], b'{"a": "text", "b": [[1]]}'),
        (TYPES["safetensors"], PRODUCT.replace(b"F32", b"F99", 1)),
        (TYPES["npz"], to_npz({"a": np.zeros(2, np.complex64), "b": B})),
    ],
    ids=["json", "safetensors", "npz"],
)
def test_a_detail_about_one_tensor_begins_with_its_name(client: httpx.Client, content_type: str, body: bytes) -> None:
    problem = check_problem(client.post("/v1/matmul", content=body, headers={"content-type": content_type}), 400)
    assert problem["detail"].startswith("a: ")


@pytest.mark.parametrize(
    ("op", "body", "detail"),
    [
        ("search", {"a": [[1]], "b": [[1]], "k": 1}, "k: an option of search, and no input; options go into the query"),
        (
            "matmul",
            {"a": [[1]], "b": [[1]], "activation": "relu"},
            "activation: .*, got a string; options go into the query",
        ),
        ("matmul", {"a": [[1]], "b": "@weights/w"}, r"b: a resident is named in the query, .*: type \?b=@weights/w"),
        ("softmax", {"x": [1, None]}, "x: holds null; expected numbers in nested lists$"),
    ],
)
def test_what_belongs_in_the_query_is_said_to(client: httpx.Client, op: str, body: Any, detail: str) -> None:
    problem = check_problem(client.post(f"/v1/{op}", json=body), 400)
    assert re.match(detail, problem["detail"])


def test_a_body_that_is_missing_is_said_to_be_empty(client: httpx.Client) -> None:
    problem = check_problem(client.post("/v1/matmul"), 415)
    assert problem["detail"].startswith("body: no Content-Type, and it is empty; expected ")


@pytest.mark.parametrize("program", [{"steps": []}, [1, 2]])
def test_a_program_is_no_part_of_a_call_that_reads_none(client: httpx.Client, program: object) -> None:
    response = client.post("/v1/softmax", json={"x": [1, 2], "program": program})
    assert check_problem(response, 400)["detail"].startswith("program: ")
    # To an upload it is a name as any other.
    response = client.put("/v1/tensors/named-program", json={"program": [1, 2]})
    assert (response.status_code, response.json()["shape"]) == (201, [2])
    assert client.delete("/v1/tensors/named-program").status_code == 204


@pytest.mark.parametrize("arrays", [{"": A, "a": A, "b": B}, {"a": A, "b": B, "": A}])
def test_an_unnamed_tensor_beside_all_inputs_is_400(client: httpx.Client, arrays: dict[str, Any]) -> None:
    check_problem(
        client.post("/v1/matmul", content=to_safetensors(arrays), headers=SAFETENSORS),
        400,
        "a: given twice in the body",
    )


@pytest.mark.parametrize("body", [b"hello, world", b"", b"\x89PNG\r\n\x1a\n", b"<html>"])
@pytest.mark.parametrize("content_type", [None, "text/html", "application/octet-stream"])
def test_bodies_in_no_known_format_are_415(client: httpx.Client, content_type: str | None, body: bytes) -> None:
    headers = {"content-type": content_type} if content_type else {}
    check_problem(client.post("/v1/matmul", content=body, headers=headers), 415, "safetensors", "npz", "npy", "json")


@pytest.mark.parametrize("write", [to_npy, to_npz, to_safetensors])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/softmax"), ("PUT", "/v1/tensors/w")])
def test_a_file_that_curl_left_bytes_out_of_is_refused_with_what_to_type(
    client: httpx.Client, write: Callable[[Any], bytes], method: str, path: str
) -> None:
    x = np.ones((2, 3), np.float32)
    body = write(x if write is to_npy else {"x": x})
    # As `curl -d @file` does.
    left = re.sub(rb"[\r\n\0]", b"", body)
    response = client.request(method, path, content=left, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert response.status_code in (400, 415)
    assert "send a file with curl by --data-binary @file" in response.json()["detail"]


def test_text_of_curl_is_refused_without_that(client: httpx.Client) -> None:
    response = client.post(
        "/v1/softmax", content=b'{"x": [1, "a"]}', headers={"Content-Type": "application/x-www-form-urlencoded"}
    )
    assert "curl" not in check_problem(response, 400, "x")["detail"]


def test_content_encodings_are_415(client: httpx.Client) -> None:
    response = client.post("/v1/matmul", content=PRODUCT, headers={**SAFETENSORS, "content-encoding": "gzip"})
    check_problem(response, 415, "Content-Encoding")


@pytest.mark.parametrize("value", ["", "identity", "Identity"])
def test_no_content_encoding_may_be_written_out(client: httpx.Client, value: str) -> None:
    headers = {**SAFETENSORS, "content-encoding": value}
    assert client.post("/v1/matmul", content=PRODUCT, headers=headers).status_code == 200
    assert client.put("/v1/tensors/as-it-is", content=to_npy(A), headers=headers | NPY).status_code in (200, 201)
    inputs = [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]
    response = client.post("/v2/models/softmax/infer", json={"inputs": inputs}, headers={"content-encoding": value})
    assert response.status_code == 200


def test_content_encodings_are_415_where_the_body_may_be_left_out(client: httpx.Client) -> None:
    for name, array in (("a", A), ("b", B)):
        client.put(f"/v1/tensors/encoded/{name}", content=to_npy(array)).raise_for_status()
    body, headers = to_safetensors({"bias": np.ones(B.shape[-1], np.float32)}), {"content-encoding": "gzip"}
    response = client.post("/v1/matmul?a=@encoded/a&b=@encoded/b", content=body, headers=headers)
    check_problem(response, 415, "Content-Encoding")


def test_a_deadline_of_less_than_a_nanosecond_passes(client: httpx.Client) -> None:
    check_problem(client.post("/v1/matmul?timeout_ms=0.0000001", content=PRODUCT), 504, "deadline")


@pytest.mark.parametrize(("query", "field"), [("placment=single", "placment"), ("dtype=float16", "dtype")])
def test_uploads_with_parameters_that_there_are_not_are_400(client: httpx.Client, query: str, field: str) -> None:
    check_problem(client.put(f"/v1/tensors/misspelt?{query}", content=to_npy(A)), 400, field, "placement")
    assert client.head("/v1/tensors/misspelt").status_code == 404
