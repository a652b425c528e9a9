"""`/v2/systemsharedmemory` and `/v2/cudasharedmemory`: registration, status and what is refused, over HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from tests.conftest import SMALL
from tests.support.live_server import LiveServer, serving
from tests.support.raw_http import RawConnection, head, post
from tests.support.shared_objects import PREFIX, shared_object

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
NBYTES = 3 * 4096


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--allow-shared-memory", "--shared-memory-prefix", f"/{PREFIX}", "--shared-memory-bytes", "1MiB")
    with serving(tmp_path_factory.mktemp("sharing") / "log", *SMALL, *flags) as server:
        yield server


@pytest.fixture
def http(sharing: LiveServer) -> Iterator[httpx.Client]:
    with sharing.client() as client:
        yield client
        assert client.post(f"{SYSTEM}/unregister").status_code == 200


@pytest.fixture
def path() -> Iterator[Path]:
    with shared_object(NBYTES) as path:
        yield path


def register(client: httpx.Client, name: str, **values: object) -> httpx.Response:
    return client.post(f"{SYSTEM}/region/{name}/register", content=json.dumps(values))


def names(client: httpx.Client) -> list[str]:
    return [region["name"] for region in client.get(f"{SYSTEM}/status").json()]


def test_a_life_of_a_region(http: httpx.Client, path: Path) -> None:
    assert http.get(f"{SYSTEM}/status").json() == []
    assert register(http, "r", key=f"/{path.name}", offset=4096, byte_size=100).status_code == 200
    described = [{"name": "r", "key": f"/{path.name}", "offset": 4096, "byte_size": 100}]
    assert http.get(f"{SYSTEM}/status").json() == described
    assert http.get(f"{SYSTEM}/region/r/status").json() == described
    again = register(http, "r", key=path.name, byte_size=1)
    assert again.status_code == 400
    assert "registered already" in again.json()["error"]
    assert http.post(f"{SYSTEM}/region/r/unregister").status_code == 200
    assert http.post(f"{SYSTEM}/region/r/unregister").status_code == 200
    assert http.get(f"{SYSTEM}/region/r/status").status_code == 404
    assert register(http, "r", key=path.name, byte_size=NBYTES).status_code == 200


def test_unregistering_all(http: httpx.Client, path: Path) -> None:
    for name in ("b", "a", "c"):
        assert register(http, name, key=path.name, byte_size=10).status_code == 200
    assert names(http) == ["a", "b", "c"]
    assert http.post(f"{SYSTEM}/unregister").status_code == 200
    assert names(http) == []


@pytest.mark.parametrize("name", ["with blank", "a/b", "status", "é", "%25", "?#", "x" * 255, "register"])
def test_names_as_clients_quote_them(http: httpx.Client, path: Path, name: str) -> None:
    url = f"{SYSTEM}/region/{quote(name)}"
    assert http.post(f"{url}/register", json={"key": path.name, "byte_size": 10}).status_code == 200
    assert [region["name"] for region in http.get(f"{url}/status").json()] == [name]
    assert http.post(f"{url}/unregister").status_code == 200
    assert names(http) == []


@pytest.mark.parametrize(
    "values",
    [
        {"byte_size": NBYTES + 1},
        {"offset": 1, "byte_size": NBYTES},
        {"offset": NBYTES, "byte_size": 1},
        {"offset": 2**63 - 1, "byte_size": 2**63 - 1},
        {"offset": 2**64 - 100, "byte_size": 200},
        {"offset": 2**70, "byte_size": 1},
        {"byte_size": 0},
        {"byte_size": -1},
        {"offset": -1, "byte_size": 10},
        {"byte_size": True},
        {"byte_size": 10.0},
        {"byte_size": "10"},
        {"byte_size": None},
        {},
        {"byte_size": 10, "key": 7},
        {"byte_size": 10, "key": ""},
        {"byte_size": 10, "key": None},
        {"byte_size": 10, "key": "/../etc/passwd"},
        {"byte_size": 10, "key": f"{PREFIX}/../x"},
        {"byte_size": 10, "key": f"{PREFIX}\0"},
        {"byte_size": 10, "key": f"{PREFIX}absent"},
        {"byte_size": 10, "key": f"{PREFIX}\ud800"},
        {"byte_size": 10, "key": PREFIX + "x" * 300},
        {"byte_size": 10, "key": "sem.other"},
    ],
)
def test_what_cannot_be_right_is_400(http: httpx.Client, path: Path, values: dict[str, object]) -> None:
    answer = register(http, "r", **{"key": path.name, **values})
    assert answer.status_code == 400, answer.text
    assert str(path.parent) not in answer.json()["error"]
    assert names(http) == []


def test_a_region_of_no_bytes_is_told_the_smallest(http: httpx.Client, path: Path) -> None:
    answer = register(http, "r", key=path.name, byte_size=0)
    assert answer.json() == {"error": "byte_size: expected a whole number of bytes in [1, 2^63 - 1]"}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"key": "x", "key": "y"}', b"\xff", b'{"byte_size": ' + b"9" * 5000 + b"}"]
)
def test_a_body_that_is_none_is_400(http: httpx.Client, body: bytes) -> None:
    assert http.post(f"{SYSTEM}/region/r/register", content=body).status_code == 400


def test_a_body_that_is_too_long_is_413(http: httpx.Client) -> None:
    response = http.post(f"{SYSTEM}/region/r/register", content=b" " * 70000)
    assert response.status_code == 413
    # No setting raises this limit.
    assert response.json()["error"].endswith("over the limit of 65536 bytes")


def test_links_and_folders_are_refused(http: httpx.Client, path: Path) -> None:
    link, folder, pipe = (path.with_name(f"{path.name}-{kind}") for kind in ("link", "folder", "pipe"))
    link.symlink_to(path)
    folder.mkdir()
    os.mkfifo(pipe)
    try:
        for one in (link, folder, pipe):
            assert register(http, "r", key=one.name, byte_size=1).status_code == 400
    finally:
        link.unlink()
        folder.rmdir()
        pipe.unlink()


def test_the_quota_is_422(http: httpx.Client) -> None:
    with shared_object(2**20) as first, shared_object(2**20) as second:
        assert register(http, "first", key=first.name, byte_size=2**20).status_code == 200
        assert register(http, "second", key=second.name, byte_size=1).status_code == 422
        http.post(f"{SYSTEM}/region/first/unregister")
        assert register(http, "second", key=second.name, byte_size=2**20).status_code == 200


def test_every_gateway_knows_every_region(sharing: LiveServer, http: httpx.Client, path: Path) -> None:
    first, second = (RawConnection(sharing.connect_to(pid)) for pid in sharing.gateways())
    body = b'{"key": "%b", "byte_size": 10}' % path.name.encode()
    with first, second:
        for _ in range(5):
            first.send(post(f"{SYSTEM}/region/r/register", body))
            assert first.answer().status == 200
            second.send(post(f"{SYSTEM}/region/r/register", body))
            assert second.answer().status == 400
            second.send(head("GET", f"{SYSTEM}/status"))
            assert [region["name"] for region in second.answer().json()] == ["r"]
            second.send(post(f"{SYSTEM}/region/r/unregister", b""))
            assert second.answer().status == 200
            first.send(head("GET", f"{SYSTEM}/region/r/status"))
            assert first.answer().status == 404


def test_an_empty_form_as_some_clients_send_it(http: httpx.Client) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded", "content-length": "0"}
    for path in (SYSTEM, CUDA, f"{SYSTEM}/region/x", f"{CUDA}/region/x"):
        assert http.post(f"{path}/unregister", headers=headers).status_code == 200


def test_cuda_shared_memory_is_empty_and_not_offered(http: httpx.Client) -> None:
    assert http.get(f"{CUDA}/status").json() == []
    assert http.get(f"{CUDA}/region/x/status").status_code == 404
    assert http.post(f"{CUDA}/region/x/register", json={}).status_code == 400


def test_without_the_flag_nothing_can_be_registered(client: httpx.Client, path: Path) -> None:
    refused = register(client, "r", key=path.name, byte_size=10)
    assert refused.status_code == 400
    assert "--allow-shared-memory" in refused.json()["error"]
    assert client.get(f"{SYSTEM}/status").json() == []
    assert client.get(f"{SYSTEM}/region/r/status").status_code == 404
    for path_of in (SYSTEM, CUDA):
        assert client.post(f"{path_of}/unregister").status_code == 200
        assert client.post(f"{path_of}/region/r/unregister").status_code == 200
