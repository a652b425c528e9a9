"""Two replicas behind a real nginx with the configuration of `deploy/nginx`: one is stopped, restarted and killed under load.

No request may fail, except those that were under way when a replica was killed.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.nginx import CONFIG, proxying
from tests.support.programs import free_port
from tests.support.replica import Replica
from tests.support.tensor_bodies import from_safetensors, to_safetensors
from tilewire.service.config.settings import Settings

pytestmark = pytest.mark.slow

FLAGS = ("--gateways", "2", "--arena-bytes", "64MiB", "--max-body-bytes", "16MiB")
NUM_CLIENTS = 8
ENOUGH = 200
WAIT_S = 90.0
POLL_S = 0.02


@dataclass
class Load:
    """Clients that multiply until they are told to end, and what became of their requests."""

    url: str
    ending: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    failures: list[tuple[float, float, str]] = field(default_factory=list)

    def client(self, seed: int) -> None:
        """One client, on a connection that is kept: each request is a product of its own, and checked."""
        rng = np.random.default_rng(seed)
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            while not self.ending.is_set():
                a, b = rng.integers(-8, 8, (2, 32, 32)).astype(np.float32)
                began_s = time.monotonic()
                trouble = self.multiply(client, a, b)
                if trouble is None:
                    self.answered += 1
                else:
                    self.failures.append((began_s, time.monotonic(), trouble))

    def multiply(self, client: httpx.Client, a: np.ndarray, b: np.ndarray) -> str | None:
        try:
            answer = client.post("/v1/matmul", content=to_safetensors({"a": a, "b": b}))
        except httpx.HTTPError as error:
            return repr(error)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:200]}"
        return None if np.array_equal(from_safetensors(answer.content)["out"], a @ b) else "a wrong product"

    def goes_on(self) -> None:
        """Returns when some more requests have ended, well or not."""
        seen = self.answered + len(self.failures)
        wait_until(lambda: self.answered + len(self.failures) >= seen + ENOUGH)


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(POLL_S)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    folders = [tmp_path / name for name in ("one", "two")]
    both: list[Replica] = []
    try:
        for folder in folders:
            folder.mkdir()
            both.append(Replica(folder, free_port(), *FLAGS))
        yield both
    finally:
        statuses = [replica.server.stop() for replica in both]
    assert statuses == [0, 0]


@pytest.fixture
def proxy(replicas: list[Replica], tmp_path: Path) -> Iterator[str]:
    with proxying(tmp_path / "proxy", [f"127.0.0.1:{replica.port}" for replica in replicas]) as url:
        yield url


@contextlib.contextmanager
def under_load(url: str) -> Iterator[Load]:
    load = Load(url)
    threads = [threading.Thread(target=load.client, args=(seed,)) for seed in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.ending.set()
        for thread in threads:
            thread.join()


@pytest.mark.timeout(400)
def test_one_is_stopped_and_restarted_and_one_is_killed_under_load(replicas: list[Replica], proxy: str) -> None:
    one, two = replicas
    with under_load(proxy) as load:
        wait_until(lambda: one.answered() > ENOUGH and two.answered() > ENOUGH)

        assert one.server.stop() == 0
        load.goes_on()
        assert load.failures == []
        one.start()
        wait_until(lambda: one.answered() > ENOUGH)
        assert load.failures == []

        killed_s = time.monotonic()
        two.kill()
        dead_s = time.monotonic()
        load.goes_on()
        two.start()
        wait_until(lambda: two.answered() > ENOUGH)

    assert load.answered > 4 * ENOUGH
    # Dying processes still take connections, so a client may lose several requests meanwhile, and none that it sends later.
    assert not [failure for failure in load.failures if failure[1] < killed_s or failure[0] > dead_s]
    print(f"{load.answered} products answered and right, {len(load.failures)} lost with the killed replica")


def test_without_replicas_nginx_says_so_in_json(replicas: list[Replica], proxy: str) -> None:
    with httpx.Client(base_url=proxy, timeout=30, trust_env=False) as client:
        for replica in replicas:
            assert replica.server.stop() == 0
        unreachable = client.get("/v2/health/ready")
    assert unreachable.status_code == 503
    assert unreachable.headers["retry-after"] == "1"
    assert unreachable.json()["error"]
    assert unreachable.json()["status"] == 503
    for replica in replicas:
        replica.start()


def test_idle_connections_are_closed_by_nginx_first() -> None:
    text = CONFIG.read_text(encoding="utf-8")
    kept_s = re.findall(r"keepalive_timeout (\d+)s;", text)
    assert len(kept_s) == text.count("\n    upstream ")
    assert max(map(float, kept_s)) < Settings.model_fields["keep_alive_s"].default
    (largest,) = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(largest) * 2**20 == Settings.model_fields["max_body_bytes"].default
