"""Mutated requests through sockets, parser and codecs together; `make fuzz` sends a million."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.fuzz import FLAGS, GOOD, MARK, Worker, corpus, fuzz, mutate
from benchmarks.soak_calls import upload
from tests.conftest import StartServer
from tests.support.raw_http import RawConnection

NUM_REQUESTS = 3000


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_mutated_requests_harm_nobody(start_server: StartServer) -> None:
    report = fuzz(start_server(*FLAGS), NUM_REQUESTS, num_workers=2, seed=7)
    assert report["problems"] == []
    requests, compared, statuses = report["requests"], report["good_compared"], report["statuses"]
    assert isinstance(requests, int)
    assert isinstance(compared, int)
    assert isinstance(statuses, dict)
    assert requests >= NUM_REQUESTS
    assert compared > NUM_REQUESTS / 40
    assert {"200", "400", "404"} <= set(statuses)


@pytest.mark.slow
def test_unmutated_requests_are_right(shared_server: StartServer) -> None:
    """What is mutated was good: else nothing behind the first check would ever be reached."""
    server, statuses = shared_server(*FLAGS), []
    with server.client() as client:
        upload(client)
    for begin, body in corpus(np.random.default_rng(1)):
        with RawConnection(server.connect()) as connection:
            connection.send(begin + b"content-length: %d\r\n\r\n" % len(body) + body)
            statuses.append(connection.answer().status)
    assert sum(status in (200, 201) for status in statuses) > 0.7 * len(statuses)


def test_what_is_wrong_is_seen() -> None:
    worker = Worker(("127.0.0.1", 1), 1)
    worker._judge(500, b"", b"sent")
    worker._judge(200, b"x" + MARK.tobytes(), b"sent")
    assert [re.split(r"[: ]", problem)[0] for problem in worker.outcome.problems] == ["500", "foreign"]
    worker._judge(400, b"", b"sent")
    assert len(worker.outcome.problems) == 2


def test_mutations_repeat_by_seed_and_change() -> None:
    once, again = (mutate(np.random.default_rng(seed), GOOD) for seed in (3, 3))
    assert once == again
    changed = [mutate(np.random.default_rng(seed), GOOD) for seed in range(50)]
    assert sum(data != GOOD for data in changed) > 45
    assert len(set(changed)) > 45
