"""`GET /v1/history`: what went wrong can be read by request id, and by whom."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import StartServer
from tests.support.api_keys import entry, keys_file
from tilewire.service.telemetry.counters import MAX_FAILURES
from tilewire.service.telemetry.history import PERIOD_S

WAIT_S = 4 * PERIOD_S + 10
POLL_S = 0.1
ALL = 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]'
KEYS = {"operator": ALL, "one": 'ops = ["*"]', "other": 'ops = ["*"]'}


def failures(client: httpx.Client) -> list[dict[str, Any]]:
    return client.get("/v1/history").raise_for_status().json()["failures"]  # type: ignore[no-any-return]


def wait_failure(client: httpx.Client, request_id: str) -> dict[str, Any]:
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        found = [one for one in failures(client) if one["request_id"] == request_id]
        if found:
            return found[0]
        time.sleep(POLL_S)
    raise AssertionError(f"{request_id} is not in the history")


@pytest.mark.parametrize(
    ("method", "path", "op", "route", "status", "reason"),
    [
        ("POST", "/v1/add?alpha=x", "add", "/v1/add", 400, "invalid_request"),
        ("POST", "/v2/models/matmul/infer", "matmul", "/v2/models/matmul/infer", 400, "invalid_request"),
        ("GET", "/v1/tensors/secret/name", None, "/v1/tensors/{name}", 404, "not_found"),
        ("GET", "/no/such/path", None, "", 404, "not_found"),
        ("POST", "/metrics", None, "/metrics", 405, "method_not_allowed"),
    ],
)
def test_a_failure_is_listed(
    client: httpx.Client, method: str, path: str, op: str | None, route: str, status: int, reason: str
) -> None:
    request_id = f"history-{method}-{status}-{op}"
    body = {"a": 1, "b": 1} if method == "POST" else None
    assert client.request(method, path, headers={"x-request-id": request_id}, json=body).status_code == status
    found = wait_failure(client, request_id)
    assert found.pop("time") == pytest.approx(time.time(), abs=60)
    expected = {"method": method, "route": route, "op": op, "status": status, "reason": reason, "key": None}
    assert found == {**expected, "request_id": request_id}


def test_requests_of_an_interval_are_counted(client: httpx.Client) -> None:
    assert client.post("/v1/reduce?kind=sum", json={"x": [1, 2]}).status_code == 200
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        intervals = client.get("/v1/history").json()["intervals"]
        if any(one.get("requests", {}).get("reduce") for one in intervals):
            break
        time.sleep(POLL_S)
    found = next(one for one in intervals if one.get("requests", {}).get("reduce"))
    assert found["seconds"] == pytest.approx(PERIOD_S, abs=PERIOD_S)
    assert 0 < found["latency"]["p50"] <= found["latency"]["p99"]


@pytest.mark.slow
def test_a_key_sees_its_own_failures(start_server: StartServer, tmp_path: Path) -> None:
    path = keys_file(tmp_path, *(entry(name, f"tw_{name}", rights) for name, rights in KEYS.items()))
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB", "--api-keys-file", str(path))
    clients = {}
    for name in KEYS:
        clients[name] = server.client()
        clients[name].headers["x-api-key"] = f"tw_{name}"
    with clients["operator"] as operator, clients["one"] as one, clients["other"] as other:
        assert httpx.get(f"{server.url}/v1/history", trust_env=False).status_code == 401
        headers = {"x-request-id": "of-one"}
        assert one.post("/v1/add?alpha=x", json={"a": 1, "b": 1}, headers=headers).status_code == 400
        assert wait_failure(operator, "of-one")["key"] == "one"
        assert wait_failure(one, "of-one")["reason"] == "invalid_request"
        seen = failures(other)
        assert seen == []
        assert "unauthorized" in {entry["reason"] for entry in failures(operator)}
        # Whoever has no key empties nobody's list.
        for number in range(MAX_FAILURES + 1):
            headers = {"x-request-id": f"nobody-{number}"}
            assert httpx.get(f"{server.url}/v1/tensors", headers=headers, trust_env=False).status_code == 401
        wait_failure(operator, f"nobody-{MAX_FAILURES}")
        assert "of-one" in {entry["request_id"] for entry in failures(operator)}
        assert [entry["request_id"] for entry in failures(one)] == ["of-one"]
