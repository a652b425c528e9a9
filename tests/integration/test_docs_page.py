"""`/docs` in a real browser: nothing comes from another host, and the first example runs at once."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import chromium
from tests.support.live_server import LiveServer
from tilewire.service.gateway.api.pages import DOCS_PATHS as PATHS


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.slow
@pytest.mark.alone
def test_an_example_runs_at_once_and_nothing_comes_from_elsewhere(browser: Browser, server: LiveServer) -> None:
    page = browser.new_page()
    origins: set[str] = set()
    page.on("request", lambda request: origins.add("/".join(request.url.split("/")[:3])))
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{server.url}/docs")
    call = page.locator(".opblock", has=page.locator("[data-path='/v1/matmul']"))
    call.locator(".opblock-summary-control").click()
    expect(call.locator(".body-param__text")).to_contain_text('"dtype": "float32"')
    call.locator("button.execute").click()
    expect(call.locator(".responses-table.live-responses-table tbody .response-col_status")).to_contain_text("200")
    expect(call.locator(".responses-table.live-responses-table")).to_contain_text("19")
    assert errors == []
    assert {origin for origin in origins if origin.startswith("http")} == {server.url}
    page.close()


@pytest.mark.parametrize("path", PATHS)
def test_every_file_is_served_with_a_policy(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert client.head(path).status_code == 200
    assert client.get(path, headers={"if-none-match": response.headers["etag"]}).status_code == 304


def test_the_page_names_no_other_host(client: httpx.Client) -> None:
    assert "//" not in client.get("/docs").text
    assert client.get("/openapi.json").json()["servers"] == [{"url": "."}]
