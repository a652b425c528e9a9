"""Shared memory, API keys and read-only servers: who may register regions, ask about them and compute through them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.conftest import SMALL, StartServer
from tests.support.api_keys import entry, keys_file
from tests.support.live_server import LiveServer, serving
from tests.support.oip_bodies import text_input
from tests.support.problems import check_error, check_problem
from tests.support.raw_http import RawConnection, head
from tests.support.shared_objects import PREFIX, shared_object
from tests.support.tensor_bodies import to_npy, to_safetensors

SYSTEM, INFER = "/v2/systemsharedmemory", "/v2/models/softmax/infer"
SHARER, RUNNER = "tw_sharer", "tw_runner"
ENTRIES = (
    entry("sharer", SHARER, 'ops = ["softmax"]\nshared_memory = true'),
    entry("runner", RUNNER, 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]'),
)
FLAGS = ("--allow-shared-memory", "--shared-memory-prefix", f"/{PREFIX}")
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("guarded")
    keys = keys_file(folder, *ENTRIES)
    with serving(folder / "log", *SMALL, *FLAGS, "--api-keys-file", str(keys)) as server:
        yield server


def holder(server: LiveServer, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False, headers={"x-api-key": key})


def from_region() -> dict[str, object]:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": X.nbytes}
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(X.shape), "parameters": parameters}]}


def into_region() -> dict[str, object]:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": X.nbytes, "shared_memory_offset": X.nbytes}
    return {"inputs": [text_input("x", X)], "outputs": [{"name": "out", "parameters": parameters}]}


def test_only_the_right_to_shared_memory_opens_it(guarded: LiveServer) -> None:
    with holder(guarded, SHARER) as sharer, holder(guarded, RUNNER) as runner, shared_object(2 * X.nbytes) as path:
        path.write_bytes(X.tobytes() + bytes(X.nbytes))
        registration = json.dumps({"key": f"/{path.name}", "byte_size": 2 * X.nbytes})
        assert sharer.post(f"{SYSTEM}/region/r/register", content=registration).status_code == 200
        for refused in (
            runner.get(f"{SYSTEM}/status"),
            runner.get(f"{SYSTEM}/region/r/status"),
            runner.post(f"{SYSTEM}/region/other/register", content=registration),
            runner.post(f"{SYSTEM}/region/r/unregister"),
            runner.post(f"{SYSTEM}/unregister"),
            runner.post(INFER, json=from_region()),
            runner.post(INFER, json=into_region()),
        ):
            check_error(refused, 403, "shared memory")
        assert path.read_bytes()[X.nbytes :] == bytes(X.nbytes), "nothing was written for a key without the right"
        assert [one["name"] for one in sharer.get(f"{SYSTEM}/status").json()] == ["r"]
        assert sharer.post(INFER, json=from_region()).status_code == 200
        assert sharer.post(INFER, json=into_region()).status_code == 200
        assert np.frombuffer(path.read_bytes(), np.float32, offset=X.nbytes).reshape(X.shape).sum(-1) == pytest.approx(
            1
        )
        assert sharer.post(f"{SYSTEM}/unregister").status_code == 200


def test_a_registration_is_refused_before_its_body_is_read(guarded: LiveServer) -> None:
    with RawConnection(guarded.connect()) as raw:
        target = f"{SYSTEM}/region/r/register"
        raw.send(head("POST", target, content_length="1000", expect="100-continue", x_api_key=RUNNER))
        assert raw.answer().status == 403


def test_without_a_key_nothing_is_told(guarded: LiveServer) -> None:
    with guarded.client() as nobody:
        for response in (nobody.get(f"{SYSTEM}/status"), nobody.post(f"{SYSTEM}/unregister"), nobody.post(INFER)):
            check_error(response, 401, "key")


@pytest.fixture
def read_only(shared_server: StartServer) -> Iterator[httpx.Client]:
    server = shared_server("--gateways", "1", "--arena-bytes", "16MiB", *FLAGS, "--read-only-tensors")
    with server.client() as client:
        yield client


def test_a_read_only_server_writes_no_shared_memory(read_only: httpx.Client) -> None:
    client = read_only
    with shared_object(2 * X.nbytes) as path:
        registration = json.dumps({"key": f"/{path.name}", "byte_size": 2 * X.nbytes})
        check_error(client.post(f"{SYSTEM}/region/r/register", content=registration), 403, "read-only")
        check_error(client.post(INFER, json=into_region()), 403, "read-only")


def test_a_read_only_server_changes_no_tensor(read_only: httpx.Client) -> None:
    body = to_safetensors({"a": X, "b": X.T})
    check_problem(read_only.put("/v1/tensors/x", content=to_npy(X)), 403, "read-only")
    check_problem(read_only.delete("/v1/tensors/x"), 403, "read-only")
    check_problem(read_only.post("/v1/matmul?store=@x", content=body), 403, "read-only")
    assert read_only.post("/v1/matmul", content=body).status_code == 200
