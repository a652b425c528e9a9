"""Scrapers beside requests: their cost for a gateway, and a service that writes no file for them."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.exposition import scrape, settles, total
from tests.support.live_server import LiveServer
from tests.support.raw_http import RawConnection, head
from tests.support.tensor_bodies import to_safetensors

ONES = to_safetensors({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)})
NUM_SCRAPERS = 20
SCRAPING_S = 3.0
MAX_SHARE_OF_A_CORE = 0.5


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_scrapers_leave_a_gateway_to_its_requests(start_server: StartServer) -> None:
    server = start_server("--gateways", "1", "--arena-bytes", "16MiB")
    (gateway,) = server.gateways()
    is_over = threading.Event()

    def ask(server: LiveServer) -> int:
        count = 0
        with RawConnection(server.connect()) as connection:
            while not is_over.is_set():
                connection.send(head("GET", "/metrics"))
                assert connection.answer().status == 200
                count += 1
        return count

    with ThreadPoolExecutor(NUM_SCRAPERS) as pool:
        began_s, before_s = time.monotonic(), cpu_s(gateway)
        scrapers = [pool.submit(ask, server) for _ in range(NUM_SCRAPERS)]
        with server.client() as client:
            while time.monotonic() < began_s + SCRAPING_S:
                assert client.post("/v1/matmul", content=ONES).status_code == 200
        used_s, passed_s = cpu_s(gateway) - before_s, time.monotonic() - began_s
        is_over.set()
        counts = [scraper.result() for scraper in scrapers]
    assert min(counts) > 0
    print(f"{sum(counts) / passed_s:.0f} scrapes/s, {used_s / passed_s:.2f} of a core")
    assert used_s / passed_s < MAX_SHARE_OF_A_CORE


@pytest.mark.slow
def test_figures_need_no_file(start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that fills up would end every process that has a file of it mapped."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    server = start_server("--gateways", "2", "--arena-bytes", "16MiB")
    with server.client() as client:
        assert client.post("/v1/matmul", content=ONES).status_code == 200
        assert settles(client, lambda now: total(now, "tilewire_flops_total") > 0)
        assert total(scrape(client), "tilewire_kernel_compiles_total") == 0
    assert list(folder.rglob("*")) == []
    for pid in (server.process.pid, *server.gateways(), *server.engines()):
        assert str(folder) not in Path(f"/proc/{pid}/maps").read_text()
