"""Headless Chromium for tests: finds it, starts it, opens pages that remember what went wrong. Knows no page of ours."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, ViewportSize, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ENDPOINTS = ("/metrics", "/openapi.json", "/v1/", "/v2")
# How fast a page is says how busy the machine is.
TIMEOUT_MS = 20_000
DESKTOP, PHONE = ViewportSize(width=1280, height=900), ViewportSize(width=360, height=740)


def find_chromium() -> str | None:
    """The browser of the system, or None."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; without one the test skips itself, but in CI it fails."""
    executable = find_chromium()
    if executable is None:
        reason = f"no browser: none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Complaints:
    """What the browser complained of on one page.

    Attributes:
        errors: Exceptions and what stands in the browser's console. That an endpoint refused, which the browser notes there
            too, is the page's to show; only what the page itself consists of must be there.
        origins: Where the page's requests went.
        waiting: Requests that were not answered yet, and when they were sent, on the monotonic clock.
    """

    errors: list[str] = field(default_factory=list)
    origins: set[str] = field(default_factory=set)
    waiting: dict[Request, float] = field(default_factory=dict)

    def watch(self, page: Page) -> None:
        """Listens to the page."""
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._on_request)
        page.on("requestfinished", self._on_answer)
        page.on("requestfailed", self._on_answer)

    def tell_waiting(self) -> None:
        """Prints which requests wait for an answer, and for how long: a test that fails shows it."""
        for request, sent_s in self.waiting.items():
            print(f"no answer for {time.monotonic() - sent_s:.1f} s: {request.method} {request.url}")

    def _on_console(self, message: ConsoleMessage) -> None:
        path = urlsplit(message.location.get("url", "")).path
        is_refusal = message.text.startswith("Failed to load resource") and path.startswith(ENDPOINTS)
        if message.type in ("error", "warning") and not is_refusal:
            self.errors.append(f"{message.text} ({path})")

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        self.origins.add(f"{parts.scheme}://{parts.netloc}")
        self.waiting[request] = time.monotonic()

    def _on_answer(self, request: Request) -> None:
        self.waiting.pop(request, None)
