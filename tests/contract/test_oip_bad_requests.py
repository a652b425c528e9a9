"""What a bad request under `/v2` gets: a status, `{"error": …}`, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest

from tests.support.exposition import check_left_idle
from tests.support.float64_oracle import random_array
from tests.support.oip_bodies import LENGTH, bad_products, to_binary, to_text
from tests.support.problems import check_error
from tests.support.raw_http import RawConnection, head

Raw = Callable[[], RawConnection]

A = random_array("float32", (4, 3), 1)
MATMUL, SOFTMAX, ADD = (f"/v2/models/{name}/infer" for name in ("matmul", "softmax", "add"))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(client: httpx.Client) -> Iterator[None]:
    yield
    check_left_idle(client)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/nonsense", 404),
        ("GET", "/v2/models/nonsense/config", 404),
        ("GET", "/v2/models/nonsense/ready", 404),
        ("GET", "/v2/models/nonsense/stats", 404),
        ("POST", "/v2/models/nonsense/infer", 404),
        ("GET", "/v2/models/matmul/versions/2", 404),
        ("GET", "/v2/models/matmul/versions/2/ready", 404),
        ("POST", "/v2/models/matmul/versions/01/infer", 404),
        ("GET", "/v2/nonsense", 404),
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/matmul/trace/setting", 404),
        ("GET", "/v2/models/matmul/", 404),
        ("POST", "/v2/models/matmul/infer/", 404),
        ("GET", "/v2/health/ready/", 404),
        ("GET", "//v2/models/matmul", 404),
        ("POST", "//v2/models/matmul/infer", 404),
        ("POST", "/v2//models/matmul/infer", 404),
        ("POST", "/v2/./models/matmul/infer", 404),
        ("POST", "/x/../v2/models/matmul/infer", 404),
        ("POST", "/%2e/v2/models/matmul/infer", 404),
        ("POST", "/V2/../v2/models/matmul/infer", 404),
        ("GET", MATMUL, 405),
        ("PUT", MATMUL, 405),
        ("DELETE", "/v2", 405),
        ("GET", "/v2/repository/index", 405),
        ("POST", "/v2/models/stats", 405),
    ],
)
def test_paths_that_are_not_there(raw: Raw, method: str, path: str, status: int) -> None:
    connection = raw()
    connection.send(head(method, path, content_length="0"))
    answer = connection.answer()
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json().keys() == {"error"}
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(("body", "headers"), bad_products().values(), ids=bad_products())
def test_requests_that_cannot_be_right_are_400(client: httpx.Client, body: bytes, headers: dict[str, str]) -> None:
    check_error(client.post(MATMUL, content=body, headers=headers), 400)


def test_a_header_length_given_twice_is_400(raw: Raw) -> None:
    body, headers = to_binary({"x": A})
    lines = f"{LENGTH}: {headers[LENGTH]}\r\n" * 2
    connection = raw()
    connection.send(f"POST {SOFTMAX} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode() + body)
    answer = connection.answer()
    assert answer.status == 400
    assert "Inference-Header" in answer.json()["error"]


def test_limits_are_413_and_422(client: httpx.Client) -> None:
    # Refused before a byte of it is read.
    too_long = client.post(SOFTMAX, content=bytes(17 * 2**20), headers={LENGTH: "0"})
    check_error(too_long, 413, "Content-Length")
    check_error(client.post(SOFTMAX, content=b" " * (9 * 2**20)), 413, "JSON")
    check_error(client.post(SOFTMAX, content=bytes(9 * 2**20), headers={LENGTH: str(9 * 2**20)}), 413, "JSON")
    chunked = client.post(SOFTMAX, content=iter([b" " * 2**20] * 9))
    check_error(chunked, 413, "JSON")
    nine = np.zeros((1,) * 9, np.float32)
    check_error(client.post(ADD, content=to_text({"a": nine, "b": nine})), 422, "rank")
    # M×1 · 1×N: few bytes that ask for 64 GiB.
    tall, wide = np.zeros((2**17, 1), np.float32), np.zeros((1, 2**17), np.float32)
    body, headers = to_binary({"a": tall, "b": wide})
    check_error(client.post(MATMUL, content=body, headers=headers), 422, "out:")
    zero = {"name": "a", "datatype": "FP32", "shape": [0, 2**62], "data": []}
    check_error(client.post(ADD, content=json.dumps({"inputs": [zero]})), 400)
    zero = {"name": "x", "datatype": "FP32", "shape": [0, 2**62], "data": []}
    check_error(client.post(SOFTMAX, content=json.dumps({"inputs": [zero]})), 422, "elements")


def test_answers_too_large_for_json_are_413(client: httpx.Client) -> None:
    body, headers = to_binary({"x": np.zeros(2**21 + 1, np.float32)})
    check_error(client.post(SOFTMAX, content=body, headers=headers), 413, "binary_data")


def test_a_deadline_that_has_passed_is_504(client: httpx.Client) -> None:
    response = client.post(ADD, content=to_text({"a": A, "b": A}, parameters={"timeout": 1}))
    check_error(response, 504, "deadline")


def test_a_request_without_length_is_411(raw: Raw) -> None:
    connection = raw()
    connection.send(head("POST", MATMUL))
    answer = connection.answer()
    assert answer.status == 411
    assert answer.json().keys() == {"error"}


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\nbroken header\r\n\r\n",
        b"POST /v2/models/add/infer HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"POST /v2/models/add/infer?a=1 HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v2/models/add/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST //v2/models/add/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"GET /v2/models/add HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET /v2/" + b"x" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=lambda value: repr(value[:30]),
)
def test_errors_of_the_parser_have_the_same_form(raw: Raw, request_bytes: bytes) -> None:
    connection = raw()
    connection.send(request_bytes)
    answer = connection.answer()
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json().keys() == {"error"}


def test_request_ids_cannot_break_out(client: httpx.Client) -> None:
    # What an HTTP library lets through: a megabyte is refused by the bound on heads.
    response = client.get("/v2", headers={"x-request-id": "a b"})
    assert response.headers["x-request-id"] != "a b"
    check_error(client.get("/v2/nothing", headers={"x-request-id": "x" * 60_000}), 404)


def test_what_is_no_number_is_told_where_options_go_only_where_they_do(client: httpx.Client) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": ["1"]}]}
    assert client.post(SOFTMAX, json=body).json() == {
        "error": "x: data: holds a string; expected numbers in nested lists"
    }
    detail = client.post("/v1/softmax", json={"x": [1], "log": True}).json()["detail"]
    assert detail == "log: expected numbers in nested lists, got a boolean; options go into the query"
