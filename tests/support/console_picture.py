"""The console's picture in the README: from a server that runs here, or from a recording of one that ran elsewhere.

    python -m tests.support.console_picture docs/console.png                            serves on this machine's CPU
    python -m tests.support.console_picture docs/console.png --recording run.json.gz    see `tests.support.console_recording`

The page that is drawn from a recording is the page that is served. Owns the replay; knows no load.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, ViewportSize

from tests.support.browser import PHONE, chromium
from tests.support.console_recording import DEFAULT_S, served_under_load
from tilewire.service.gateway.api.pages import console_assets

DESKTOP = ViewportSize(width=1280, height=900)
REPLAYED = "http://console.invalid"


def take(path: Path, recording: Path | None, scheme: str, is_phone: bool, seconds: int) -> None:
    """Takes the picture when the history has filled: of the live figures on a desktop, of one screen on a phone."""
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(chromium())
        context = browser.new_context(
            viewport=PHONE if is_phone else DESKTOP,
            color_scheme="dark" if scheme == "dark" else "light",
            device_scale_factor=2 if is_phone else 1,
        )
        page = context.new_page()
        if recording is None:
            page.goto(stack.enter_context(served_under_load("cpu", seconds + 15)))
        else:
            # The last second has no successor: a counter that stands still would look like an idle server.
            seconds = min(seconds, _replay(page, recording) - 2)
            page.goto(REPLAYED)
        page.wait_for_timeout(seconds * 1000)
        if is_phone:
            page.screenshot(path=path)
        else:
            form = page.locator("section.try").bounding_box()
            assert form is not None
            page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": 1280, "height": form["y"] - 2})
        context.close()
    print(f"{path}: {path.stat().st_size} bytes")


def _replay(page: Page, recording: Path) -> int:
    """Answers the page's questions from a recording, in its own time; returns how many seconds that has."""
    with gzip.open(recording, "rt", encoding="utf-8") as file:
        recorded: dict[str, Any] = json.load(file)
    frames, assets = recorded["frames"], console_assets()
    began_s = time.monotonic()
    page.clock.install(time=recorded["began_at"])

    def answer(route: Route) -> None:
        path = "/" + route.request.url.removeprefix(REPLAYED).lstrip("/")
        if path in assets:
            route.fulfill(body=assets[path].body, headers=assets[path].headers)
            return
        kept = frames[min(int(time.monotonic() - began_s), len(frames) - 1)][path]
        route.fulfill(status=kept["status"], headers=kept["headers"], body=kept["body"])

    page.route("**/*", answer)
    return len(frames)


def main() -> None:
    """Takes the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--recording", type=Path, help="instead of serving here")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("--seconds", type=int, default=DEFAULT_S)
    arguments = parser.parse_args()
    take(arguments.path, arguments.recording, arguments.scheme, arguments.phone, arguments.seconds)


if __name__ == "__main__":
    main()
