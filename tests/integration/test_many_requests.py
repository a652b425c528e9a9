"""Nothing is lost or mixed: thousands of different requests over many gateways, some cut off, every answer compared.

`make many` sends a hundred thousand; `MANY_REQUESTS` says how many this test sends.
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import StartServer
from tests.support.exposition import is_idle, scrape, settles
from tests.support.many_requests import ManyRequests

pytestmark = pytest.mark.slow

NUM_REQUESTS = int(os.environ.get("MANY_REQUESTS", "10000"))


@pytest.mark.timeout(1200)
def test_no_answer_is_lost_or_anothers(start_server: StartServer) -> None:
    server = start_server("--gateways", "4", "--arena-bytes", "64MiB")
    tally = ManyRequests(server.url, NUM_REQUESTS).run()
    assert tally.wrong == []
    assert tally.sent == NUM_REQUESTS
    assert tally.compared + tally.cut == tally.sent
    assert tally.cut > 0
    with server.client() as client:
        assert settles(client, is_idle), scrape(client)
