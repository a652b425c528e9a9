"""What an open console costs: how often it asks, what it asks no more, and that its own refusals do not fill the failures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.api_keys import entry, keys_file
from tests.support.browser import DESKTOP
from tests.support.live_server import LiveServer, serving
from tests.support.programs import free_port

KEY = "tw_console"
# Needs no key, and is asked each second: the page's clock.
READINESS = "/v2/health/ready"
GUARDED = ("/metrics", "/v1/history", "/v1/kernels", "/v1/programs", "/v1/tensors", "/v2")
WAIT_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with keys, whose metrics are on a port of their own, as the Helm chart runs it."""
    folder = tmp_path_factory.mktemp("console")
    keys = keys_file(folder, entry("console", KEY, 'ops = ["*"]\nread = ["*"]\nwrite = ["*"]'))
    flags = ("--gateways", "1", "--arena-bytes", "64MiB", "--api-keys-file", str(keys))
    with serving(folder / "log", *flags, "--metrics-port", str(free_port())) as server:
        yield server


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a tab without a key; it has loaded nothing."""
    with browser.new_context(viewport=DESKTOP) as context:
        yield context.new_page()


@pytest.fixture
def asked(page: Page) -> Counter[str]:
    """How often the page asks for each path."""
    asked: Counter[str] = Counter()
    page.on("request", lambda request: asked.update([urlsplit(request.url).path]))
    return asked


def wait_until(page: Page, holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        page.wait_for_timeout(50)


def let_pass(page: Page, asked: Counter[str], seconds: int) -> None:
    """Waits for as many seconds of the page's clock."""
    end = asked[READINESS] + seconds
    wait_until(page, lambda: asked[READINESS] >= end)


def failures_of(client: httpx.Client) -> Counter[tuple[str, int]]:
    """The server's list of failures: reasons and statuses."""
    failures = client.get("/v1/history").raise_for_status().json()["failures"]
    return Counter((failure["reason"], failure["status"]) for failure in failures)


@pytest.mark.slow
def test_what_is_refused_is_not_asked_each_second(page: Page, server: LiveServer, asked: Counter[str]) -> None:
    with server.client() as client:
        client.headers["x-api-key"] = KEY
        before = failures_of(client)
        page.goto(server.url)
        expect(page.locator("#notice")).to_contain_text("asks for an API key")
        expect(page.locator("#residents-note")).to_have_text("needs an API key")
        let_pass(page, asked, 6)
        assert {path: asked[path] for path in GUARDED} == dict.fromkeys(GUARDED, 1)
        assert failures_of(client) - before == {("unauthorized", 401): len(GUARDED)}

        page.get_by_role("button", name="API key").click()
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_contain_text("does not offer its metrics here")
        expect(page.locator("#residents-note")).not_to_have_text("needs an API key")
        let_pass(page, asked, 6)
        assert asked["/metrics"] == 2
        assert asked["/v1/tensors"] > 2
        assert failures_of(client) - before == {("unauthorized", 401): len(GUARDED), ("not_found", 404): 1}


@pytest.mark.parametrize("status", [404, *(pytest.param(status, marks=pytest.mark.slow) for status in (403, 429))])
def test_a_minute_later_it_asks_again(page: Page, server: LiveServer, asked: Counter[str], status: int) -> None:
    page.route("**/metrics", lambda route: route.fulfill(status=status, body=""))
    page.clock.install()
    page.goto(server.url)
    let_pass(page, asked, 3)
    assert asked["/metrics"] == 1
    page.clock.fast_forward(50_000)
    let_pass(page, asked, 2)
    assert asked["/metrics"] == 1
    page.clock.fast_forward(10_000)
    wait_until(page, lambda: asked["/metrics"] == 2)
    let_pass(page, asked, 2)
    assert asked["/metrics"] == 2


@pytest.mark.slow
def test_an_error_of_the_server_is_asked_again_at_once(page: Page, server: LiveServer, asked: Counter[str]) -> None:
    page.route("**/metrics", lambda route: route.fulfill(status=503, body=""))
    page.goto(server.url)
    wait_until(page, lambda: asked["/metrics"] > 3)


@pytest.mark.slow
def test_a_tab_that_is_seen_again_does_not_ask_before_its_time(
    page: Page, server: LiveServer, asked: Counter[str]
) -> None:
    page.route("**/v1/kernels", lambda route: route.fulfill(json={"devices": []}))
    page.goto(server.url)
    let_pass(page, asked, 2)
    for _ in range(5):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    let_pass(page, asked, 2)
    assert asked["/v1/kernels"] == 1
