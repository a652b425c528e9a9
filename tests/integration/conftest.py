"""A browser, and the console in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import DESKTOP, Complaints, chromium
from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: LiveServer) -> Iterator[Page]:
    """The console on a desktop; it must not complain, and must ask nobody but its server."""
    with browser.new_context(viewport=DESKTOP) as context:
        page = context.new_page()
        complaints = Complaints()
        complaints.watch(page)
        page.goto(server.url)
        yield page
        page.close()
    assert complaints.errors == []
    assert complaints.origins - {"blob://"} <= {server.url}
