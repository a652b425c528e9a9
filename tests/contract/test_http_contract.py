"""The HTTP contract, row by row: statuses, headers, formats, options, names. Numbers are checked in integration."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import numpy as np
import pytest

from tests.support.float64_oracle import random_array
from tests.support.live_server import BACKEND
from tests.support.problems import check_problem
from tests.support.raw_http import RawConnection, head, post
from tests.support.tensor_bodies import TYPES, decode, encode, from_safetensors, to_json, to_npy, to_npz, to_safetensors

Raw = Callable[[], RawConnection]

SAFETENSORS = {"content-type": TYPES["safetensors"]}
JSON = {"content-type": TYPES["json"]}
A = random_array("float32", (4, 3), 1)
B = random_array("float32", (3, 5), 2)
PRODUCT = to_safetensors({"a": A, "b": B})


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


def test_headers_that_nobody_reads_change_nothing(raw: Raw) -> None:
    """However a head was answered before: one line that may be read in two ways makes it another."""
    connection = raw()
    lines = b"POST /v1/matmul HTTP/1.1\r\nhost: tests\r\ncontent-type: %b\r\ncontent-length: %d\r\n"
    plain = lines % (TYPES["safetensors"].encode(), len(PRODUCT))
    for more in (b"", b"user-agent: one\r\n", b"X-Number: 2\r\ncookie: a=b; c\r\n", b"x-empty:\r\n"):
        connection.send(plain + more + b"\r\n" + PRODUCT)
        answer = connection.answer()
        assert answer.status == 200
        np.testing.assert_allclose(from_safetensors(answer.body)["out"], A @ B, rtol=1e-4, atol=1e-5)
    for more in (b"x-name : 1\r\n", b"x-name\r\n", b" folded\r\n", b"x-name: a\0b\r\n", b"x-name: a\rb\r\n"):
        broken = raw()
        broken.send(plain + b"\r\n" + PRODUCT)
        assert broken.answer().status == 200
        broken.send(plain + more + b"\r\n" + PRODUCT)
        assert broken.answer().status == 400, more


def test_a_megabyte_of_request_id_is_refused_and_the_next_request_is_served(raw: Raw, client: httpx.Client) -> None:
    connection = raw()
    connection.send(head("GET", "/healthz", x_request_id="x" * 2**20))
    answer = connection.answer()
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(answer.body) < 1000
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("path", "inputs"),
    [
        ("/v1/add?alpha=", {"a": np.array([-0.0], np.float32), "b": np.array([1], np.float32)}),
        ("/v1/pointwise?fn=abs&scale=", {"x": np.array([1], np.float32)}),
    ],
)
def test_zeros_of_both_signs_have_their_own_answers(
    client: httpx.Client, path: str, inputs: dict[str, np.ndarray]
) -> None:
    """Whichever came before: -0.0 + 0.0·1 is 0.0, and -0.0 + -0.0·1 is -0.0."""
    body = to_safetensors(inputs)
    for _ in range(4):
        for zero in ("0.0", "-0.0"):
            answer = client.post(path + zero, content=body, headers=SAFETENSORS)
            assert answer.status_code == 200, answer.text
            (out,) = from_safetensors(answer.content)["out"]
            assert (out, bool(np.signbit(out))) == (0, zero == "-0.0")


@pytest.mark.parametrize("zero", ["", "&shift=0.0", "&shift=-0.0"])
def test_a_shift_of_zero_changes_nothing(client: httpx.Client, zero: str) -> None:
    body = to_safetensors({"x": np.array([0, -0.0], np.float32)})
    for _ in range(3):
        answer = client.post(f"/v1/pointwise?fn=neg{zero}", content=body, headers=SAFETENSORS)
        assert answer.status_code == 200, answer.text
        assert np.signbit(from_safetensors(answer.content)["out"]).tolist() == [True, False]


def test_a_fraction_is_refused_for_integers_after_its_whole_number(client: httpx.Client) -> None:
    body = to_safetensors({"a": np.array([1], np.int32), "b": np.array([2], np.int32)})
    for _ in range(3):
        assert client.post("/v1/add?alpha=1", content=body, headers=SAFETENSORS).status_code == 200
        check_problem(client.post("/v1/add?alpha=1.0", content=body, headers=SAFETENSORS), 400, "alpha")


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
    check_problem(response, 415, "Accept: 'text/html' names no format")
    halves = to_safetensors({"a": random_array("bfloat16", (2, 2)), "b": random_array("bfloat16", (2, 2))})
    response = client.post("/v1/add", content=halves, headers={**SAFETENSORS, "accept": TYPES["npy"]})
    check_problem(response, 415, "bfloat16")


@pytest.mark.parametrize("content_type", ["application/vnd.safetensors", "application/x-safetensors; charset=binary"])
def test_other_names_of_safetensors(client: httpx.Client, content_type: str) -> None:
    response = client.post("/v1/matmul", content=PRODUCT, headers={"content-type": content_type})
    assert response.status_code == 200


# ── paths, methods, lengths ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/conv", "/v1/MATMUL", "/v1/matmul%00"])
def test_no_such_op_is_404(client: httpx.Client, path: str) -> None:
    check_problem(client.post(path, content=PRODUCT, headers=SAFETENSORS), 404)


@pytest.mark.parametrize("path", ["/nothing", "/v1/", "/v1/matmul/x", "/v3/models"])
def test_no_such_path_is_404(client: httpx.Client, path: str) -> None:
    check_problem(client.get(path), 404)


@pytest.mark.parametrize("path", ["/v1/v1/matmul", "/v1/v1/tensors", "/v1/matmul/x"])
def test_a_path_below_an_op_is_no_op(client: httpx.Client, path: str) -> None:
    problem = check_problem(client.post(path, content=PRODUCT, headers=SAFETENSORS), 404, "path")
    assert problem["detail"] == f"path: there is nothing at {path!r}"


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
        ("POST", "/v1/tensors", {"GET", "HEAD"}),
        ("DELETE", "/v1/tensors", {"GET", "HEAD"}),
        ("POST", "/v1/tensors/x", {"GET", "HEAD", "PUT", "DELETE"}),
        ("PATCH", "/v1/tensors/x/y", {"GET", "HEAD", "PUT", "DELETE"}),
        ("POST", "/metrics", {"GET", "HEAD"}),
        ("DELETE", "/readyz", {"GET", "HEAD"}),
    ],
)
def test_other_methods_are_405_and_say_which_are_allowed(
    client: httpx.Client, method: str, path: str, allowed: set[str]
) -> None:
    response = client.request(method, path)
    check_problem(response, 405, "method")
    assert set(response.headers["allow"].split(", ")) == allowed


def paths_to_get(client: httpx.Client) -> list[str]:
    """Every path that the OpenAPI document offers a GET of, filled in, and those that it leaves out."""
    document = client.get("/openapi.json").json()
    names = {"tensors": "head/x", "programs": "head", "models": "add", "kernels": "add"}
    paths = ["/v2/", "/", "/docs", "/openapi.json"]
    for path, calls in document["paths"].items():
        if "get" in calls:
            kind = path.split("/")[2] if path.count("/") > 1 else ""
            filled = path.replace("{version}", "1")
            paths.append(re.sub(r"\{[^}]*\}", names.get(kind, "none"), filled))
    return paths


def test_head_is_get_without_a_body(client: httpx.Client) -> None:
    client.put("/v1/tensors/head/x", content=to_npy(A)).raise_for_status()
    program = {
        "inputs": {"x": {"dtype": "float32", "shape": [-1, 8]}},
        "steps": [{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}],
        "outputs": ["p"],
    }
    client.put("/v1/programs/head", json=program).raise_for_status()
    try:
        found = 0
        for path in paths_to_get(client):
            got, headed = client.get(path), client.head(path)
            assert (headed.status_code, headed.content) == (got.status_code, b""), path
            if not path.startswith("/v1/tensors/"):
                assert headed.headers.get("content-type") == got.headers.get("content-type"), path
            found += got.status_code == 200
    finally:  # other tests count the models of the server that they share
        client.delete("/v1/programs/head").raise_for_status()
        client.delete("/v1/tensors/head/x").raise_for_status()
    assert found > 15


def test_nothing_is_said_twice_in_the_openapi_document(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    ids = [call["operationId"] for calls in paths.values() for call in calls.values()]
    assert len(ids) == len(set(ids))


def test_the_server_is_described_with_and_without_a_slash(client: httpx.Client) -> None:
    described = client.get("/v2/")
    assert described.status_code == 200
    assert described.json() == client.get("/v2").json()


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
@pytest.mark.parametrize("path", ["/v1/matmul", "/v1/tensors", "/v2/models/matmul/infer"])
def test_two_keys_are_400(raw: Raw, name: str, path: str) -> None:
    connection = raw()
    twice = f"{name}: Bearer one\r\n{name}: Bearer two\r\n"
    method = "GET" if path == "/v1/tensors" else "POST"
    connection.send(f"{method} {path} HTTP/1.1\r\nhost: tests\r\ncontent-length: 0\r\n{twice}\r\n".encode())
    answer = connection.answer()
    assert answer.status == 400
    assert "given twice" in str(answer.json())


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip,\tCHUNKED", "deflate , chunked"])
@pytest.mark.parametrize("path", ["/v1/matmul", "/v1/tensors/coded", "/v2/models/matmul/infer"])
def test_other_transfer_codings_are_501_and_close(raw: Raw, coding: str, path: str) -> None:
    connection = raw()
    method = "PUT" if "tensors" in path else "POST"
    connection.send(head(method, path, transfer_encoding=coding) + b"3\r\nabc\r\n")
    answer = connection.answer()
    assert answer.status == 501
    assert "Transfer-Encoding" in str(answer.json())
    assert answer.headers["connection"] == "close"
    assert connection.is_closed()


@pytest.mark.parametrize("coding", ["gzip", "chunked, gzip", "chunked, chunked", ", chunked", "identity"])
def test_codings_that_do_not_end_in_chunks_are_400(raw: Raw, coding: str) -> None:
    connection = raw()
    connection.send(head("POST", "/v1/matmul", transfer_encoding=coding) + b"0\r\n\r\n")
    assert connection.answer().status == 400
    assert connection.is_closed()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", "Host: expected once, got 0"),
        (b"GET /v2 HTTP/1.1\r\nhost: a b\r\n\r\n", "Host: expected a name or an address"),
        (head("GET", "/healthz", x_long="a" * 70_000), "the request line and headers exceed 65536 bytes"),
        (head("POST", "/v1/matmul", transfer_encoding="gzip"), "Transfer-Encoding"),
        (head("POST", "/v1/matmul", content_length="+5"), "Content-Length"),
        (head("BREW", "/v1/matmul"), "method"),
        (b"GET /healthz HTTP/2.0\r\nhost: tests\r\n\r\n", "neither HTTP/1.1 nor HTTP/1.0"),
        (b"CONNECT tests:80 HTTP/1.1\r\nhost: tests:80\r\n\r\n", "the target is neither a path nor a URL"),
    ],
)
def test_what_is_no_request_is_told_why(raw: Raw, bad: bytes, said: str) -> None:
    connection = raw()
    connection.send(bad)
    answer = connection.answer()
    assert answer.status == 400
    assert said in answer.json().get("detail", answer.json().get("error"))
    assert connection.is_closed()


@pytest.mark.parametrize("refused", [b"bad header\r\n\r\n", b"host: again\r\n\r\n", b"x-long: " + b"a" * 2**17])
def test_a_refused_head_has_the_id_that_was_read(raw: Raw, refused: bytes) -> None:
    given = b"GET /healthz HTTP/1.1\r\nhost: tests\r\nx-request-id: first\r\n"
    for head_before in (given, given.replace(b"first", b"two words"), given.replace(b"x-request-id", b"x-other")):
        connection = raw()
        connection.send(head_before + refused)
        answer = connection.answer()
        assert answer.status == 400
        assert answer.headers["x-request-id"] == answer.json()["request_id"]
        assert (answer.headers["x-request-id"] == "first") is (head_before is given)
    # Nor has it that of the request before.
    for sent in (b"GET / HTTP/1.1\r\nhost: tests\r\n" + refused, b"\0"):
        connection = raw()
        connection.send(given + b"\r\n")
        assert connection.answer().headers["x-request-id"] == "first"
        connection.send(sent)
        answer = connection.answer()
        assert answer.status == 400
        assert answer.headers["x-request-id"] != "first"


def test_a_connection_closes_behind_connect(raw: Raw) -> None:
    connection = raw()
    connection.send(b"CONNECT tests:443 HTTP/1.1\r\nhost: tests:443\r\n\r\n" + head("GET", "/healthz"))
    answer = connection.answer()
    assert answer.status >= 400
    assert answer.headers["connection"] == "close"
    assert connection.is_closed()


@pytest.mark.parametrize("path", ["/v1/matmul", "/v1/run"])
def test_neither_length_nor_chunks_is_411(raw: Raw, path: str) -> None:
    connection = raw()
    connection.send(head("POST", path))
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
    assert f"the limit of {16 * 2**20} bytes, --max-body-bytes" in answer.json()["detail"]


def test_chunks_over_max_body_bytes_are_413(client: httpx.Client) -> None:
    response = client.post("/v1/matmul", content=(bytes(2**20) for _ in range(17)), headers=SAFETENSORS)
    assert "--max-body-bytes" in check_problem(response, 413, "body")["detail"]


def test_an_npz_that_inflates_past_the_limit_is_413(client: httpx.Client) -> None:
    bomb = to_npz({"a": np.zeros((17, 2**18), np.float32)}, is_deflated=True)
    problem = check_problem(
        client.post("/v1/matmul", content=bomb, headers={"content-type": TYPES["npz"]}), 413, "body"
    )
    assert "--max-body-bytes" in problem["detail"]


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
    row = np.full((1, 131_072), -128, np.int8)
    arrays = {"a": row, "b": row.T}
    check_problem(client.post("/v1/matmul", content=to_safetensors(arrays), headers=SAFETENSORS), 422, "a")
    fits = to_safetensors({name: np.ascontiguousarray(row[:, 1:]) for name in ("a", "b")})
    answer = client.post(
        "/v1/matmul?transpose_b=true", content=fits, headers={**SAFETENSORS, "Accept": "application/json"}
    )
    assert answer.json()["out"] == [[2**14 * 131_071]]


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
    assert answer["engines"][0]["backend"] == BACKEND


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
