"""Versions of residents: `ETag` says which, and `If-Match` makes reads and changes exact, with or without a store."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

import tilewire
from tests.conftest import StartServer
from tests.support.live_server import LiveServer
from tests.support.problems import check_error, check_problem
from tests.support.tensor_bodies import from_safetensors, to_npy, to_safetensors

EYE = np.eye(2, dtype=np.float32)
PROGRAM = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, 2]}},
    "steps": [{"op": "matmul", "inputs": {"a": "x", "b": "@versioned"}, "as": "y"}],
    "outputs": ["y"],
}


@pytest.fixture(autouse=True)
def no_program_stays(client: httpx.Client) -> Iterator[None]:
    """Other files share the server, and list what there is."""
    yield
    client.delete("/v1/programs/versioned")


def put(client: httpx.Client, value: float, name: str = "versioned", **headers: str) -> httpx.Response:
    return client.put(f"/v1/tensors/{name}", content=to_npy(EYE * value), headers=headers)


def infer(client: httpx.Client, **headers: str) -> httpx.Response:
    inputs = [
        {"name": "a", "datatype": "FP32", "shape": [1, 2], "data": [1, 0]},
        {"name": "b", "parameters": {"resident": "versioned"}},
    ]
    return client.post("/v2/models/matmul/infer", json={"inputs": inputs}, headers=headers)


def test_every_read_can_demand_a_version(client: httpx.Client) -> None:
    first = put(client, 1).headers["etag"]
    assert client.put("/v1/programs/versioned", json=PROGRAM).status_code in (200, 201)
    for value in (1.0, 2.0):
        tag = put(client, value).headers["etag"] if value > 1 else first
        demand = {"if-match": tag}
        fetched = client.get("/v1/tensors/versioned", headers=demand)
        assert fetched.headers["etag"] == client.head("/v1/tensors/versioned", headers=demand).headers["etag"] == tag
        assert from_safetensors(fetched.content)["versioned"][0, 0] == value
        # The second time, the request comes from the cache of templates.
        for _ in range(2):
            product = client.post("/v1/matmul?b=@versioned", content=to_safetensors({"a": EYE}), headers=demand)
            assert from_safetensors(product.content)["out"][0, 0] == value
            run = client.post("/v1/programs/versioned", content=to_safetensors({"x": EYE}), headers=demand)
            assert from_safetensors(run.content)["y"][0, 0] == value
            assert infer(client, **demand).json()["outputs"][0]["data"] == [value, 0]
    assert tag != first
    late = {"if-match": first}
    check_problem(client.get("/v1/tensors/versioned", headers=late), 412, "if-match")
    assert client.head("/v1/tensors/versioned", headers=late).status_code == 412
    answer = client.post("/v1/matmul?b=@versioned", content=to_safetensors({"a": EYE}), headers=late)
    check_problem(answer, 412, "versioned")
    answer = client.post("/v1/programs/versioned", content=to_safetensors({"x": EYE}), headers=late)
    check_problem(answer, 412, "versioned")
    assert infer(client, **late).status_code == 412
    # Requests that name no resident have nothing to compare.
    both = to_safetensors({"a": EYE, "b": EYE})
    assert client.post("/v1/matmul", content=both, headers=late).status_code == 200


def version_of(client: httpx.Client, name: str) -> int:
    """The version that all descriptions of a tensor agree on."""
    tag = client.head(f"/v1/tensors/{name}").headers["etag"]
    (listed,) = (one["version"] for one in client.get("/v1/tensors").json() if one["name"] == name)
    assert tag == f'"{listed}"'
    return int(listed)


def test_descriptions_have_the_version(client: httpx.Client) -> None:
    uploaded = put(client, 1, "described")
    assert f'"{uploaded.json()["version"]}"' == uploaded.headers["etag"]
    assert uploaded.json()["version"] == version_of(client, "described")
    body = to_safetensors({"a": EYE, "b": EYE})
    for durable in ("false", "true"):
        stored = client.post(f"/v1/matmul?store=@described&durable={durable}", content=body)
        assert stored.status_code == 201
        assert stored.json()["version"] == version_of(client, "described")


def test_clients_that_count_lose_no_step(server: LiveServer) -> None:
    steps, num_clients = 12, 3

    def count(client: tilewire.Client) -> None:
        done = 0
        while done < steps:
            known = client.tensors["counted"].describe()
            try:
                client.put("counted", client.get("counted", if_match=known) + 1, if_match=known)
                done += 1
            except tilewire.PreconditionFailed:
                continue

    with tilewire.Client(server.url) as client:
        first = client.put("counted", np.zeros(1, np.float32))
        threads = [threading.Thread(target=count, args=(client,)) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert client.get("counted")[0] == steps * num_clients
        with pytest.raises(tilewire.PreconditionFailed, match="counted"):
            client.delete("counted", if_match=first)
        client.delete("counted", if_match="*")


def test_the_asyncio_client_demands_versions(server: LiveServer) -> None:
    async def use() -> None:
        async with tilewire.AsyncClient(server.url) as client:
            old = await client.put("awaited", EYE)
            new = await client.put("awaited", EYE * 2, if_match=old)
            assert (await client.matmul(EYE, "@awaited", if_match=new))[0, 0] == 2
            with pytest.raises(tilewire.PreconditionFailed, match="awaited"):
                await client.matmul(EYE, "@awaited", if_match=old)
            stored = await client.matmul(EYE, new, store="awaited", if_match=new)
            assert (await stored.fetch(if_match=stored))[1, 1] == 2
            await stored.delete(if_match=stored.version)

    asyncio.run(use())


def test_every_change_can_demand_a_version(client: httpx.Client) -> None:
    check_problem(put(client, 1, "contested", **{"if-match": "*"}), 412, "no such tensor")
    first = put(client, 1, "contested").headers["etag"]
    second = put(client, 2, "contested", **{"if-match": first})
    assert second.status_code == 200
    check_problem(put(client, 3, "contested", **{"if-match": first}), 412, "if-match")
    late, now = {"if-match": first}, {"if-match": f'"1", {second.headers["etag"]}'}
    check_problem(client.delete("/v1/tensors/contested", headers=late), 412, "if-match")
    assert client.delete("/v1/tensors/contested", headers=now).status_code == 204
    check_problem(client.delete("/v1/tensors/contested", headers=now), 404, "contested")
    check_problem(client.get("/v1/tensors/contested", headers=now), 404, "contested")


def test_changes_of_programs_can_demand_a_version(client: httpx.Client) -> None:
    path = "/v1/programs/exact"
    check_problem(client.put(path, json=PROGRAM, headers={"if-match": "*"}), 412, "if-match")
    created = client.put(path, json=PROGRAM)
    first = {"if-match": created.headers["etag"]}
    assert created.headers["etag"] == f'"{created.json()["version"]}"'
    replaced = client.put(path, json={**PROGRAM, "outputs": ["y"]}, headers=first)
    now = {"if-match": replaced.headers["etag"]}
    assert replaced.status_code == 200
    check_problem(client.put(path, json=PROGRAM, headers=first), 412, "if-match")
    check_problem(client.get(path, headers=first), 412, "if-match")
    assert client.get(path, headers=now).headers["etag"] == now["if-match"]
    check_problem(client.delete(path, headers=first), 412, "if-match")
    assert client.delete(path, headers=now).status_code == 204


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/tensors/versioned", "/v1/programs/versioned"])
def test_a_condition_in_the_query_is_not_lost(client: httpx.Client, method: str, path: str) -> None:
    put(client, 1)
    client.put("/v1/programs/versioned", json=PROGRAM)
    before = client.get(path).content
    sent = json.dumps(PROGRAM).encode() if "programs" in path else to_npy(EYE * 2)
    answer = client.request(method, f"{path}?if_match=17", content=sent if method == "PUT" else b"")
    check_problem(answer, 400, "if_match")
    assert client.get(path).content == before


def test_a_condition_in_the_query_of_a_description_is_not_lost(client: httpx.Client) -> None:
    put(client, 1)
    assert client.head("/v1/tensors/versioned?if_match=17").status_code == 400


@pytest.mark.parametrize("path", ["/v1/tensors/versioned", "/v1/programs/versioned"])
def test_a_condition_that_is_not_checked_changes_nothing(client: httpx.Client, path: str) -> None:
    put(client, 1)
    client.put("/v1/programs/versioned", json=PROGRAM).raise_for_status()
    body = to_npy(EYE * 2) if "tensors" in path else json.dumps(PROGRAM).encode()
    tag = client.get(path).headers["etag"]
    for value in ("*", '"1"'):
        check_problem(client.put(path, content=body, headers={"if-none-match": value}), 400, "if-none-match")
        check_problem(client.delete(path, headers={"if-none-match": value}), 400, "if-none-match")
    assert client.get(path).headers["etag"] == tag


@pytest.mark.parametrize("value", ["*", '"1"'])
def test_a_result_is_not_stored_under_a_condition_that_is_not_checked(client: httpx.Client, value: str) -> None:
    tag, headers = put(client, 1).headers["etag"], {"if-none-match": value}
    both = to_safetensors({"a": EYE, "b": EYE})
    check_problem(client.post("/v1/matmul?store=@versioned", content=both, headers=headers), 400, "if-none-match")
    inputs = [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 0]}]
    body = {"inputs": inputs, "parameters": {"store": "versioned"}}
    check_error(client.post("/v2/models/softmax/infer", json=body, headers=headers), 400, "if-none-match")
    assert client.head("/v1/tensors/versioned").headers["etag"] == tag
    assert client.post("/v1/matmul", content=both, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/tensors/versioned", "/v1/programs/versioned"])
def test_who_has_the_version_is_not_sent_it_again(client: httpx.Client, path: str) -> None:
    put(client, 1)
    client.put("/v1/programs/versioned", json=PROGRAM).raise_for_status()
    tag = client.get(path).headers["etag"]
    for known in (tag, f"W/{tag}", f'"1",{tag}', "*"):
        for method in ("GET", "HEAD"):
            answer = client.request(method, path, headers={"if-none-match": known})
            assert (answer.status_code, answer.headers["etag"], answer.content) == (304, tag, b"")
    assert client.get(path, headers={"if-none-match": '"1"'}).status_code == 200
    check_problem(client.get(path, headers={"if-none-match": tag, "if-match": '"1"'}), 412, "if-match")


@pytest.mark.parametrize("value", ["", "17", '"17', '"1" "2"'])
def test_a_condition_that_cannot_be_read_is_400(client: httpx.Client, value: str) -> None:
    put(client, 1)
    check_problem(client.get("/v1/tensors/versioned", headers={"if-match": value}), 400, "if-match")
    check_problem(put(client, 1, **{"if-match": value}), 400, "if-match")
    twice = [("if-match", '"1"'), ("if-match", '"2"')]
    check_problem(client.get("/v1/tensors/versioned", headers=twice), 400, "if-match")


@pytest.mark.slow
def test_versions_hold_over_several_engines(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "64MiB", "--device", "cpu:0,1")
    with server.client() as client:
        for number in range(8):
            path = f"/v1/tensors/w{number}?placement={'single' if number % 2 else 'replicate'}"
            first = client.put(path, content=to_npy(EYE)).headers["etag"]
            result = client.post(f"/v1/matmul?store=@r{number}", content=to_safetensors({"a": EYE, "b": EYE})).json()
            assert result["version"] == version_of(client, f"r{number}")
            second = client.put(path, content=to_npy(EYE * 2), headers={"if-match": first})
            assert second.status_code == 200
            demand = {"if-match": second.headers["etag"]}
            for _ in range(8):
                url = f"/v1/matmul?b=@w{number}"
                product = client.post(url, content=to_safetensors({"a": EYE}), headers=demand)
                assert from_safetensors(product.content)["out"][0, 0] == 2
                assert client.post(url, content=to_safetensors({"a": EYE}), headers={"if-match": first}).is_client_error
            assert client.put(path, content=to_npy(EYE), headers={"if-match": first}).status_code == 412
            assert client.get(f"/v1/tensors/w{number}", headers=demand).status_code == 200
            assert client.delete(f"/v1/tensors/w{number}", headers={"if-match": first}).status_code == 412
            assert client.delete(f"/v1/tensors/w{number}", headers=demand).status_code == 204
