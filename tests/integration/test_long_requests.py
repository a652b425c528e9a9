"""A request whose launch takes long: short ones pass it, long ones wait, and a deadline ends only what has not started."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.exposition import settles, total
from tests.support.live_server import serving
from tests.support.problems import check_problem
from tests.support.tensor_bodies import Array, from_safetensors, to_npy

# A product of this size takes two seconds or more on one core.
SIZE = 5120
TIMEOUT_MS = 400
NUM_LATE = 40


def late_paths() -> Iterator[str]:
    """Requests whose deadlines fall anywhere between the ticks of timers."""
    return (f"/v1/matmul?a=@w&b=@w&timeout_ms={100 + number / 10}" for number in range(NUM_LATE))


def values_of(response: httpx.Response) -> Array:
    assert response.status_code == 200, response.text
    (values,) = from_safetensors(response.content).values()
    return values


@pytest.mark.slow
def test_who_comes_while_a_launch_computes_is_answered(tmp_path: Path) -> None:
    served = serving(tmp_path / "log", "--gateways", "1", before=("env", "OMP_NUM_THREADS=1"))
    with served as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        w = np.zeros((SIZE, SIZE), np.float32)
        w[0, 0] = 3
        assert client.put("/v1/tensors/w", content=to_npy(w)).status_code == 201
        began_s, over = time.monotonic(), threading.Event()

        def square() -> tuple[httpx.Response, float]:
            url = f"{server.url}/v1/matmul?a=@w&b=@w&store=@square&timeout_ms={TIMEOUT_MS}"
            response = httpx.post(url, timeout=120, trust_env=False)
            over.set()
            return response, time.monotonic() - began_s

        answer = pool.submit(square)
        assert settles(client, lambda now: total(now, "tilewire_in_flight_requests") == 1)
        ones = to_npy(np.ones(4, np.float32))
        assert client.put("/v1/tensors/small", content=ones).status_code == 201
        np.testing.assert_array_equal(values_of(client.get("/v1/tensors/small")), np.ones(4))
        with ThreadPoolExecutor(NUM_LATE) as others:
            asked = [others.submit(client.post, path) for path in late_paths()]
            statuses = Counter(one.result().status_code for one in asked)
        assert statuses == {504: NUM_LATE}
        late = client.post("/v1/matmul?a=@w&b=@w&timeout_ms=1")
        np.testing.assert_array_equal(values_of(client.post("/v1/add?a=@small&b=@small")), np.full(4, 2))
        assert not over.is_set(), "The product is over too soon for this test."
        check_problem(late, 504, "deadline")
        response, took_s = answer.result()
        # It had started, so that its deadline is no matter.
        assert response.status_code == 201, response.text
        assert took_s > TIMEOUT_MS / 1e3, "The product is over too soon for this test."
        result = values_of(client.get("/v1/tensors/square"))
        assert np.count_nonzero(result) == 1
        assert result[0, 0] == 9
