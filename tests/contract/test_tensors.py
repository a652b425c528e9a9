"""Resident tensors as API.md promises them: upload, fetch, list, names, quota, store, the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

import tilewire
from tests.conftest import StartServer
from tests.support.float64_oracle import random_array
from tests.support.live_server import LiveServer
from tests.support.problems import check_problem
from tests.support.raw_http import RawConnection, head
from tests.support.tensor_bodies import TYPES, decode, from_safetensors, to_npy, to_npz, to_safetensors

Raw = Callable[[], RawConnection]

SAFETENSORS = {"content-type": TYPES["safetensors"]}
JSON = {"content-type": TYPES["json"]}
A = random_array("float32", (4, 3), 1)
B = random_array("float32", (3, 5), 2)
PRODUCT = to_safetensors({"a": A, "b": B})


DESCRIPTION = {
    "name",
    "shape",
    "dtype",
    "bytes",
    "created",
    "last_used",
    "hits",
    "version",
    "placement",
    "engines",
    "axis",
    "parts",
}


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
    created = response.json()["created"]

    response = client.head(url)
    assert response.status_code == 200
    assert response.content == b""
    assert response.headers["x-tensor-name"] == "contract/life"
    assert response.headers["x-tensor-dtype"] == "float32"
    assert response.headers["x-tensor-shape"] == "3,5"
    assert response.headers["x-tensor-bytes"] == "60"
    assert response.headers["x-tensor-created"] == created
    assert "x-tensor-last-used" not in response.headers
    assert "content-length" not in response.headers
    for accept in ("application/json", "application/x-safetensors"):
        head, get = client.head(url, headers={"accept": accept}), client.get(url, headers={"accept": accept})
        assert head.status_code == get.status_code == 200
        assert head.headers["content-type"] == get.headers["content-type"]
    # It has the metadata alone, which no format has to carry.
    head, get = client.head(url, headers={"accept": "image/png"}), client.get(url, headers={"accept": "image/png"})
    assert (head.status_code, get.status_code) == (200, 415)
    assert head.headers["x-tensor-shape"] == "3,5"
    assert "content-type" not in head.headers

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
    # A cache tells them apart by this: the tag is that of the version.
    known = client.get(url, headers={"if-none-match": response.headers["etag"]})
    assert [answer.headers["vary"] for answer in (response, known, client.head(url))] == ["accept"] * 3


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


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_line_break_behind_a_name_is_no_other_spelling_of_it(client: httpx.Client, method: str) -> None:
    client.put("/v1/tensors/contract/broken", content=to_npy(A))
    response = client.request(method, "/v1/tensors/contract/broken%0A", content=to_npy(B) if method == "PUT" else None)
    check_problem(response, 400, "path")
    assert client.head("/v1/tensors/contract/broken").headers["x-tensor-shape"] == "4,3"


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


def test_a_refused_upload_of_the_client_is_named(server: LiveServer, tmp_path: Path) -> None:
    np.savez(tmp_path / "mixed.npz", x=A, labels=np.ones(2, np.uint8))
    with tilewire.Client(server.url) as client:
        with pytest.raises(tilewire.BadRequest, match=r"^tensor mixed/labels: dtype 'U8'"):
            client.put_file(tmp_path / "mixed.npz")
        # A name that no tensor of a safetensors header can have.
        client.put("__metadata__", A).delete()
        client.put("x" * 255, A).delete()
        client.delete("mixed/x")


def test_the_quota_of_residents_is_507_and_nothing_is_evicted(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB", "--resident-bytes", "100")
    with server.client() as client:
        assert client.put("/v1/tensors/a", content=to_npy(A)).status_code == 201
        assert client.put("/v1/tensors/b", content=to_npy(A)).status_code == 201
        problem = check_problem(client.put("/v1/tensors/c", content=to_npy(A)), 507, "c")
        assert problem["detail"].endswith(" exceed the quota of 100, --resident-bytes")
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


@pytest.mark.slow
def test_a_file_that_changed_between_two_starts_has_another_version(start_server: StartServer, tmp_path: Path) -> None:
    tensors, programs = tmp_path / "tensors", tmp_path / "programs"
    paths = {tensors / "model.safetensors": "/v1/tensors/model/w", programs / "soft.json": "/v1/programs/soft"}
    step = {"op": "softmax", "inputs": {"x": "x"}, "as": "p"}
    folders = {"--tensors-dir": tensors, "--programs-dir": programs, "--store": tmp_path / "store"}
    flags = ("--gateways", "1", "--arena-bytes", "16MiB", *(str(one) for pair in folders.items() for one in pair))
    for folder in folders.values():
        folder.mkdir()
    seen: dict[str, list[str]] = {url: [] for url in paths.values()}
    for start in range(3):
        if start != 1:
            (tensors / "model.safetensors").write_bytes(to_safetensors({"w": A + start}))
            steps = [{**step, "options": {"log": start > 0}}]
            program = {"inputs": {"x": {"dtype": "float32", "shape": [-1, 8]}}, "steps": steps, "outputs": ["p"]}
            (programs / "soft.json").write_text(json.dumps(program))
            for path in paths:
                # As a copy that keeps the times of the original.
                os.utime(path, (1, 1))
        server = start_server(*flags)
        with server.client() as client:
            for url, tags in seen.items():
                known = {"if-none-match": tags[-1]} if tags else {}
                response = client.get(url, headers=known)
                assert response.status_code == (304 if start == 1 else 200)
                tags.append(response.headers["etag"])
                assert client.get(url, headers={"if-match": tags[-1]}).status_code == 200
            tag = seen["/v1/tensors/model/w"][-1]
            assert client.head("/v1/tensors/model/w").headers["etag"] == tag
            if start == 2:
                # It stands in no folder of the store, and a change may demand it all the same.
                changes = [
                    client.put("/v1/tensors/model/w", content=to_npy(A), headers={"if-match": tag}) for _ in "12"
                ]
                assert [one.status_code for one in changes] == [200, 412]
        server.stop()
    for first, second, third in seen.values():
        assert first == second != third


@pytest.mark.parametrize("name", ["dtype", "shape", "__metadata__"])
def test_a_name_that_means_something_else_in_an_answer(client: httpx.Client, name: str) -> None:
    client.put(f"/v1/tensors/{name}", content=to_npy(A)).raise_for_status()
    document = client.get(f"/v1/tensors/{name}", headers={"accept": TYPES["json"]}).json()
    assert (document.pop("dtype"), document.pop("shape")) == ("float32", [4, 3])
    np.testing.assert_array_equal(np.array(document.pop("tensor"), np.float32), A)
    assert not document
    np.testing.assert_array_equal(from_safetensors(client.get(f"/v1/tensors/{name}").content)["tensor"], A)
    assert client.head(f"/v1/tensors/{name}").headers["x-tensor-name"] == name
    assert client.delete(f"/v1/tensors/{name}").status_code == 204


def test_where_every_input_is_resident_an_empty_body_in_chunks_is_none(client: httpx.Client) -> None:
    url = "/v1/tensors/contract/alone"
    assert client.put(url, content=to_safetensors({"x": A}), headers=SAFETENSORS).status_code == 201
    no_chunks: Iterator[bytes] = iter([])
    for body in (None, b"", no_chunks):
        assert client.post("/v1/softmax?x=@contract/alone", content=body).status_code == 200
    assert client.delete(url).status_code == 204
