"""Fixtures of several files: the console in a browser, shared memory, a collector of spans, the load generator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import tritonclient.http as triton
from playwright.sync_api import Browser, Page

from tests.conftest import SMALL
from tests.support.browser import DESKTOP, Complaints, chromium
from tests.support.collector import Collector, collecting
from tests.support.live_server import LiveServer, serving
from tests.support.programs import find_program
from tests.support.triton_regions import Regions, connected


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
        complaints.tell_waiting()
        page.close()
    assert complaints.errors == []
    assert complaints.origins - {"blob://"} <= {server.url}


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("sharing") / "log", *SMALL, "--allow-shared-memory") as server:
        yield server


@pytest.fixture
def sharing_client(sharing: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with connected(sharing) as client:
        yield client


@pytest.fixture
def regions(sharing_client: triton.InferenceServerClient) -> Iterator[Regions]:
    with contextlib.ExitStack() as stack:
        yield Regions(sharing_client, stack)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def wrk() -> str:
    """The load generator; a machine without it skips the test, and CI installs it."""
    return find_program("wrk")
