"""Marks every test by the folder that it stands in, lets some run alone, and offers servers that tests share."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import httpx
import hypothesis
import pytest

from tests.support.live_server import LiveServer, serving
from tests.support.raw_http import RawConnection
from tests.support.turns import Turns

FOLDERS = ("unit", "integration", "contract", "kernels", "gpu")
ROOT = Path(__file__).parent
TURNS = Turns(ROOT, ROOT / "conftest.py")
# A worker and its servers: four took 7.6 GB.
WORKER_BYTES = 2 * 2**30
# About what a test takes that is marked slow, and another.
SLOW_S, FAST_S = 20.0, 0.1
# What is shown of a log beside a failure: its end.
LOG_CHARS = 4000
SMALL = ("--gateways", "2", "--arena-bytes", "64MiB", "--max-body-bytes", "16MiB", "--max-result-bytes", "16MiB")

# How fast examples are made says how busy the machine is.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

StartServer = Callable[..., LiveServer]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more workers than cores, if memory allows: a third of its time a worker waits for servers, time-outs and pages."""
    num_cores = len(os.sched_getaffinity(0))
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(num_cores, min(num_cores + 2, num_bytes // WORKER_BYTES))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by their folder, and begins with the files that take longest: a worker gets a file as a whole."""
    seconds: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        folder = item.path.relative_to(ROOT).parts[0]
        if folder in FOLDERS:
            item.add_marker(folder)
        seconds[item.path] += SLOW_S if item.get_closest_marker("slow") else FAST_S
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish() -> None:
    """Takes imports and tests out of the collector's sight: a pass over them is a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Lets tests marked `alone` run while no other worker runs one; the wait is outside of the test's time-out."""
    is_alone, goes_on = (one is not None and one.get_closest_marker("alone") is not None for one in (item, nextitem))
    TURNS.take(alone=is_alone)
    try:
        return (yield)
    finally:
        # Else each test of a file would wait for what others have begun since the one before.
        if not (is_alone and goes_on):
            TURNS.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows beside a failure how the logs end of the servers that run."""
    report = yield
    if report.failed:
        ends = [(log, log.read_text(errors="replace")[-LOG_CHARS:]) for log in LiveServer.logs if log.exists()]
        report.sections += [(f"log {log}", end) for log, end in ends]
    return report


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two gateways, one engine on the CPU, small limits; ends in order."""
    with serving(tmp_path_factory.mktemp("server") / "log", *SMALL) as server:
        yield server


@pytest.fixture(scope="session")
def grpc_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """As `server`, with one gateway of each kind and shared memory."""
    flags = ("--gateways", "1", "--grpc-port", "0", "--allow-shared-memory", "--shared-memory-bytes", "1MiB")
    with serving(tmp_path_factory.mktemp("grpc") / "log", *SMALL, *flags) as server:
        yield server


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers with flags of their own; each must end in order."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> LiveServer:
            number = len(list(tmp_path.glob("log-*")))
            return stack.enter_context(serving(tmp_path / f"log-{number}", *flags))

        yield start


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Returns the file's server of these flags, started at first use; a test leaves it ready and idle."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> LiveServer:
            return stack.enter_context(serving(tmp_path_factory.mktemp("shared") / "log", *flags))

        yield functools.cache(start)


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    """An HTTP client of the shared server."""
    with server.client() as client:
        yield client


@pytest.fixture
def raw(server: LiveServer) -> Iterator[Callable[[], RawConnection]]:
    """Makes raw connections to the shared server."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(RawConnection(server.connect()))
