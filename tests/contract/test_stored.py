"""Results that stay on the device: `store=`, `durable=`, and what an engine's death does to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.exposition import scrape, total
from tests.support.live_server import POLL_S, START_TIMEOUT_S, LiveServer, serving
from tests.support.problems import check_problem
from tests.support.tensor_bodies import from_safetensors, to_npy, to_safetensors
from tilewire import Client, Lost

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(20, dtype=np.float32).reshape(4, 5)
PRODUCT = to_safetensors({"a": A, "b": B})
TYPE = "application/x-safetensors"
# At this rate a host copy of a few bytes takes minutes, unless a request awaits it.
SLOW_COPIES = ("--host-copy-bytes-per-s", "1")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--gateways", "1", "--arena-bytes", "32MiB", "--no-spare-engine", *SLOW_COPIES)
    with serving(tmp_path_factory.mktemp("slow") / "log", *flags) as server:
        yield server


@pytest.fixture
def mortal(slow: LiveServer) -> Iterator[httpx.Client]:
    with slow.client() as client:
        yield client


def store(client: httpx.Client, name: str, query: str = "") -> None:
    response = client.post(f"/v1/matmul?store=@{name}{query}", content=PRODUCT, headers={"content-type": TYPE})
    assert response.status_code == 201, response.text


def fetch(client: httpx.Client, name: str) -> np.ndarray:
    response = client.get(f"/v1/tensors/{name}", headers={"accept": TYPE})
    assert response.status_code == 200, response.text
    (array,) = from_safetensors(response.content).values()
    return array


def kill_engines(server: LiveServer, client: httpx.Client) -> None:
    """Kills every engine; returns when others serve in their place."""
    restarts = total(scrape(client), "tilewire_engine_restarts_total")
    for victim in server.engines():
        os.kill(victim, signal.SIGKILL)
    end_s = time.monotonic() + START_TIMEOUT_S
    while (
        total(scrape(client), "tilewire_engine_restarts_total") == restarts or client.get("/readyz").status_code != 200
    ):
        assert time.monotonic() < end_s, "no engine came back"
        time.sleep(POLL_S)


@pytest.mark.slow
def test_a_result_without_a_host_copy_is_410_after_its_engine_died(slow: LiveServer, mortal: httpx.Client) -> None:
    assert mortal.put("/v1/tensors/uploaded", content=to_npy(A)).status_code == 201
    for name in ("lost", "deleted", "replaced"):
        store(mortal, name)
    store(mortal, "durable", "&durable=true")
    np.testing.assert_array_equal(fetch(mortal, "lost"), A @ B)
    kill_engines(slow, mortal)
    check_problem(mortal.get("/v1/tensors/lost"), 410, "lost with the engine")
    assert mortal.head("/v1/tensors/lost").status_code == 410
    check_problem(mortal.post("/v1/softmax?x=@lost"), 410, "lost with the engine")
    check_problem(mortal.post("/v1/matmul?b=@lost", content=to_safetensors({"a": A.T})), 410, "b:")
    infer = {"inputs": [{"name": "x", "parameters": {"resident": "lost"}}]}
    answer = mortal.post("/v2/models/softmax/infer", json=infer)
    assert answer.status_code == 410
    assert "lost with the engine" in answer.json()["error"]
    np.testing.assert_array_equal(fetch(mortal, "durable"), A @ B)
    np.testing.assert_array_equal(fetch(mortal, "uploaded"), A)
    assert {one["name"] for one in mortal.get("/v1/tensors").json()} == {"uploaded", "durable"}
    # Until it is written again, or deleted.
    store(mortal, "lost")
    np.testing.assert_array_equal(fetch(mortal, "lost"), A @ B)
    assert mortal.put("/v1/tensors/replaced", content=to_npy(B)).status_code in (200, 201)
    np.testing.assert_array_equal(fetch(mortal, "replaced"), B)
    assert mortal.delete("/v1/tensors/deleted").status_code == 204
    check_problem(mortal.get("/v1/tensors/deleted"), 404, "deleted")


@pytest.mark.slow
def test_the_clients_error_of_a_lost_result(slow: LiveServer, mortal: httpx.Client) -> None:
    with Client(slow.url) as ours:
        kept, lost = ours.matmul(A, B, store="kept", durable=True), ours.matmul(A, B, store="lost")
        kill_engines(slow, mortal)
        np.testing.assert_array_equal(kept.fetch(), A @ B)
        with pytest.raises(Lost, match="lost with the engine"):
            ours.softmax(lost)


@pytest.mark.slow
def test_a_result_with_its_host_copy_survives(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "32MiB", "--no-spare-engine")
    with server.client() as client:
        store(client, "first", "&durable=true")
        store(client, "again", "&durable=true")
        # Copies are made in order: when the last is there, so are those before it.
        for number in range(20):
            store(client, f"many/{number}")
        store(client, "first", "&durable=true")
        kill_engines(server, client)
        for name in ("first", "again"):
            np.testing.assert_array_equal(fetch(client, name), A @ B)


@pytest.mark.parametrize(
    "query", ["durable=true", "store=@x&durable=yes", "store=@x&durable=", "store=@x&durable=true&durable=true"]
)
def test_durable_goes_with_store(client: httpx.Client, query: str) -> None:
    check_problem(client.post(f"/v1/matmul?{query}", content=PRODUCT, headers={"content-type": TYPE}), 400, "durable:")


@pytest.mark.parametrize("path", ["/v1/search?k=1&store=@x", "/v1/run?store=@x", "/v1/run?durable=true"])
def test_what_cannot_be_stored_is_400(client: httpx.Client, path: str) -> None:
    check_problem(client.post(path, content=PRODUCT, headers={"content-type": TYPE}), 400, "store")


# ── /v2 ───────────────────────────────────────────────────────────────────────────────────────────


def infer(client: httpx.Client, **parameters: object) -> httpx.Response:
    x = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [0, 0, 0, 0]}
    return client.post("/v2/models/softmax/infer", json={"inputs": [x], "parameters": parameters, "id": "7"})


def test_an_infer_request_stores_its_output(slow: LiveServer, mortal: httpx.Client) -> None:
    for parameters in ({"store": "@half"}, {"store": "half", "durable": True}):
        answer = infer(mortal, **parameters)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {
            "id": "7",
            "model_name": "softmax",
            "model_version": "1",
            "outputs": [{"name": "out", "datatype": "FP32", "shape": [2, 2], "parameters": {"resident": "half"}}],
        }
        np.testing.assert_array_equal(fetch(mortal, "half"), np.full((2, 2), 0.5, np.float32))
    kill_engines(slow, mortal)
    np.testing.assert_array_equal(fetch(mortal, "half"), np.full((2, 2), 0.5, np.float32))


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"durable": True}, "durable"),
        ({"store": "@x", "durable": "true"}, "durable"),
        ({"store": 5}, "store"),
        ({"store": "@a b"}, "store"),
    ],
)
def test_parameters_of_a_stored_output_that_cannot_be(
    client: httpx.Client, parameters: dict[str, object], field: str
) -> None:
    answer = infer(client, **parameters)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(field)


@pytest.mark.slow
def test_a_result_that_is_larger_than_a_file_may_be_is_never_durable(tmp_path: Path) -> None:
    """It would be no other a moment later."""
    flags = ("--gateways", "1", "--arena-bytes", "1MiB", "--no-spare-engine")
    log = tmp_path / "log"
    with serving(log, *flags, before=("prlimit", f"--fsize={2**20}")) as server, server.client() as client:
        for name in ("row", "column"):
            shape = (1, 1024) if name == "row" else (1024, 1)
            assert client.put(f"/v1/tensors/{name}", content=to_npy(np.ones(shape, np.float32))).status_code == 201
        query = "/v1/matmul?a=@column&b=@row&store=@large"
        check_problem(client.post(f"{query}&durable=true"), 422, "durable: large: no host copy: File too large")
        assert client.post(query).status_code == 201
        end_s = time.monotonic() + START_TIMEOUT_S
        while "no host copy of large, which is lost with the engine" not in log.read_text():
            assert time.monotonic() < end_s
            time.sleep(POLL_S)
    assert "Traceback" not in log.read_text()
