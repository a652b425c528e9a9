"""`--allow-origin`: which pages of browsers may call, what they may see, and that nothing changes without it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from tests.support.api_keys import entry, keys_file
from tests.support.browser import chromium
from tests.support.float64_oracle import random_array
from tests.support.live_server import LiveServer, serving
from tests.support.tensor_bodies import to_npy
from tilewire.service.gateway.auth.origins import Origins

FRIEND, STRANGER = "https://friend.example", "https://stranger.example"
KEY = "tw_page"
BODY = {"a": [[1, 2]], "b": [[3], [4]]}
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-api-key"}
SMALL = ("--gateways", "1", "--arena-bytes", "16MiB")

CALL = """async ([url, headers]) => {
  try {
    const answer = await fetch(`${url}/v1/matmul`, {
      method: "POST",
      headers: { "content-type": "application/json", ...headers },
      body: JSON.stringify({ a: [[1, 2]], b: [[3], [4]] }),
    });
    const seen = ["x-request-id", "server-timing", "x-batch-size"].filter((name) => answer.headers.get(name));
    return { status: answer.status, out: (await answer.json()).out, seen };
  } catch (error) {
    return { error: String(error) };
  }
}"""


@pytest.fixture(scope="module")
def page_origin() -> Iterator[str]:
    """An origin of its own with an empty page."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def guarded(page_origin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with keys that two origins may call."""
    folder: Path = tmp_path_factory.mktemp("origins")
    keys = keys_file(folder, entry("page", KEY, 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]'))
    flags = ("--allow-origin", f"{FRIEND}, {page_origin}", "--api-keys-file", str(keys))
    with serving(folder / "log", *SMALL, *flags) as server:
        yield server


@pytest.fixture
def friend(guarded: LiveServer) -> Iterator[httpx.Client]:
    with guarded.client() as client:
        client.headers["origin"] = FRIEND
        yield client


@pytest.mark.parametrize("path", ["/v1/matmul", "/v1/tensors/a/b", "/v2/models/matmul/infer", "/nothing"])
def test_a_preflight_needs_no_key(friend: httpx.Client, path: str) -> None:
    response = friend.request("OPTIONS", path, headers=ASKED)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == FRIEND
    assert "POST" in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"].lower().split(", ")
    ours = {"if-match", "x-api-key", "x-request-id", "x-tilewire-key", "x-timeout-ms"}
    assert {"content-type", "authorization"} | ours <= set(allowed)
    assert response.headers["vary"] == "origin"
    assert response.content == b""


def test_a_preflight_is_no_call(friend: httpx.Client) -> None:
    assert friend.request("OPTIONS", "/v1/matmul").status_code == 401
    response = friend.request("OPTIONS", "/v1/matmul", headers={"x-api-key": KEY})
    assert response.status_code == 405


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", "/v1/matmul", KEY, 200),
        ("POST", "/v1/matmul", "wrong", 401),
        ("POST", "/v1/matmul?activation=x", KEY, 400),
        ("GET", "/v1/tensors", KEY, 200),
        ("GET", "/v1/tensors/nothing", KEY, 404),
        ("GET", "/nothing", KEY, 404),
        ("GET", "/healthz", KEY, 200),
        ("GET", "/openapi.json", KEY, 200),
    ],
)
def test_answers_and_errors_may_be_read(friend: httpx.Client, method: str, path: str, key: str, status: int) -> None:
    # Twice: the second one comes from the cache of templates.
    for _ in range(2):
        response = friend.request(method, path, json=BODY if method == "POST" else None, headers={"x-api-key": key})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == FRIEND
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"X-Request-Id", "Server-Timing", "X-Batch-Size"} <= set(exposed)
        assert "access-control-allow-credentials" not in response.headers


def test_a_download_may_be_read(friend: httpx.Client) -> None:
    array = random_array("float32", (3, 2), 1)
    with_key = {"x-api-key": KEY}
    assert friend.put("/v1/tensors/origins/x", content=to_npy(array), headers=with_key).status_code == 201
    response = friend.get("/v1/tensors/origins/x", headers=with_key)
    assert response.headers["access-control-allow-origin"] == FRIEND
    assert friend.delete("/v1/tensors/origins/x", headers=with_key).status_code == 204


def test_another_origin_may_not_read_and_caches_know(guarded: LiveServer) -> None:
    with guarded.client() as client:
        refused = client.request("OPTIONS", "/v1/matmul", headers={**ASKED, "origin": STRANGER})
        assert refused.status_code == 401
        for headers in ({"origin": STRANGER}, {}):
            response = client.post("/v1/matmul", json=BODY, headers={"x-api-key": KEY, **headers})
            assert response.status_code == 200
            assert "access-control-allow-origin" not in response.headers
            assert response.headers["vary"] == "origin"


def test_without_the_flag_nothing_is_allowed(client: httpx.Client) -> None:
    assert client.request("OPTIONS", "/v1/matmul", headers={**ASKED, "origin": FRIEND}).status_code == 405
    response = client.post("/v1/matmul", json=BODY, headers={"origin": FRIEND})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control") or name == "vary"]


def test_a_star_allows_every_origin() -> None:
    origins = Origins(["*"])
    assert dict(origins.headers_for({"origin": STRANGER}))["access-control-allow-origin"] == "*"
    assert origins.headers_for({}) == ()
    preflight = dict(origins.preflight("OPTIONS", {"origin": STRANGER, **ASKED}) or ())
    assert preflight["access-control-allow-origin"] == "*"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def test_a_page_of_an_allowed_origin_calls(browser: Browser, guarded: LiveServer, page_origin: str) -> None:
    page = browser.new_page()
    page.goto(page_origin)
    answer = page.evaluate(CALL, [guarded.url, {"x-api-key": KEY, "x-timeout-ms": "60000"}])
    assert answer == {"status": 200, "out": [[11]], "seen": ["x-request-id", "server-timing", "x-batch-size"]}
    page.close()


def test_a_page_of_another_origin_is_stopped(browser: Browser, server: LiveServer, page_origin: str) -> None:
    page = browser.new_page()
    page.goto(page_origin)
    assert "Failed to fetch" in page.evaluate(CALL, [server.url, {}])["error"]
    page.close()
