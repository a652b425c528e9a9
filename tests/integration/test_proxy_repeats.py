"""Which requests nginx and HAProxy send to another host, with the configurations of `deploy/`: those that change nothing.

The hosts behind them do what a request asks for and lose their answer, or answer 503, or refuse connections.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import haproxy, nginx
from tests.support.losing_server import Losses, losing
from tests.support.programs import free_port
from tests.support.raw_http import Answer, RawConnection, head

# A proxy in front of servers.
pytestmark = pytest.mark.slow

PURE = [
    ("GET", "/v1/tensors/w"),
    ("HEAD", "/v1/tensors/w"),
    ("POST", "/v1/matmul?b=@w"),
    ("POST", "/v1/matmul?b=@store=x&activation=gelu"),
    ("POST", "/v1/programs/mlp"),
    ("POST", "/v1/run"),
    ("GET", "/v2/models/matmul"),
]
CHANGES = [
    ("PUT", "/v1/tensors/w"),
    ("PUT", "/v1/programs/mlp"),
    ("DELETE", "/v1/tensors/w"),
    ("PUT", "/v1/tensors//.a/..%2Fc%2f?placement=single"),
    ("POST", "/v1/matmul?b=@w&store=@y"),
    ("POST", "/v1/softmax?store=@y"),
    ("POST", "/v1/softmax?b=@w&%73tor%65=@y"),
    ("POST", "/v2/models/matmul/infer"),
    ("POST", "/v2/systemsharedmemory/region/x/register"),
]


@dataclass
class Hosts:
    """A proxy in front of two hosts that lose answers.

    Attributes:
        url: Address of the proxy.
        losses: What the hosts saw, and what they lose.
    """

    url: str
    losses: Losses

    def send(self, method: str, target: str, body: bytes = b"") -> tuple[Answer, int]:
        """Sends a request, head and body at once; returns its answer and how many hosts saw it."""
        self.losses.seen.clear()
        parts = urlsplit(self.url)
        address = (parts.hostname or "", parts.port or 0)
        with RawConnection(socket.create_connection(address, timeout=30)) as connection:
            connection.send(head(method, target, content_length=str(len(body)), x_tilewire_key="w") + body)
            answer = connection.answer(is_head=method == "HEAD")
        assert all(one == (method, target, len(body)) for one in self.losses.seen)
        return answer, len(self.losses.seen)


@contextlib.contextmanager
def proxied(name: str, folder: Path, one: str, other: str) -> Iterator[str]:
    folder.mkdir()
    if name == "nginx":
        # A replica that lost an answer is left alone for a while, which is another matter.
        with nginx.proxying(folder, (one, other), ("max_fails=1 fail_timeout=2s", "max_fails=0")) as url:
            yield url
    else:
        changes = (("error-limit 1 on-error mark-down", "error-limit 1000"),)
        with haproxy.proxying(folder, {1: one, 2: other}, *changes) as proxy:
            yield proxy.url


@pytest.fixture(scope="module", params=["nginx", "haproxy"])
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    losses, folder = Losses(), tmp_path_factory.mktemp("repeats") / "proxy"
    with losing(losses) as one, losing(losses) as other, proxied(request.param, folder, one, other) as url:
        yield Hosts(url, losses)


@pytest.mark.parametrize(("method", "target"), PURE)
def test_what_changes_nothing_is_repeated_after_a_lost_answer(hosts: Hosts, method: str, target: str) -> None:
    hosts.losses.num_to_lose = 1
    answer, num_seen = hosts.send(method, target, b"x" * 1000 if method == "POST" else b"")
    assert (answer.status, num_seen) == (200, 2)


@pytest.mark.parametrize(("method", "target"), CHANGES)
def test_a_change_is_sent_once_and_its_lost_answer_is_no_503(hosts: Hosts, method: str, target: str) -> None:
    """Clients send a request again after 503, as nothing was done then."""
    hosts.losses.num_to_lose = 1
    answer, num_seen = hosts.send(method, target, b"x" * 1000)
    hosts.losses.num_to_lose = 0
    assert (answer.status, num_seen) == (502, 1)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == 502


@pytest.mark.parametrize(("method", "target"), [PURE[2], *CHANGES])
def test_after_503_only_what_changes_nothing_is_repeated(hosts: Hosts, method: str, target: str) -> None:
    hosts.losses.status = 503
    try:
        answer, num_seen = hosts.send(method, target, b"x" * 1000)
    finally:
        hosts.losses.status = 200
    assert answer.status == 503
    assert (num_seen > 1) == ((method, target) in PURE)


@pytest.mark.parametrize(("method", "target"), PURE)
def test_a_name_that_is_503_on_both_replicas_has_neither_left_alone(tmp_path: Path, method: str, target: str) -> None:
    """As a tensor that both are loading from the store. One worker, so that the same one has all requests."""
    losses, alone = Losses(status=503), ("worker_processes auto", "worker_processes 1")
    with (
        losing(losses) as one,
        losing(losses) as other,
        nginx.proxying(tmp_path / "proxy", (one, other), alone) as url,
    ):
        hosts, body = Hosts(url, losses), b"x" if method == "POST" else b""
        # nginx counts no last try: each request has one replica left alone.
        for _ in range(2):
            answer, num_seen = hosts.send(method, target, body)
            assert (answer.status, num_seen) == (503, 2)
        losses.status = 200
        for other_method, other in (("POST", "/v1/matmul"), ("PUT", "/v1/tensors/other")):
            assert hosts.send(other_method, other, b"x")[0].status == 200


def test_a_replica_whose_op_is_503_is_left_alone(tmp_path: Path) -> None:
    draining, well = Losses(status=503), Losses()
    with (
        losing(draining) as one,
        losing(well) as other,
        nginx.proxying(tmp_path / "proxy", (one, other)) as url,
    ):
        hosts = Hosts(url, well)
        for _ in range(5):
            assert hosts.send("POST", "/v1/softmax?axis=0", b"x")[0].status == 200
    assert len(draining.seen) == 1


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_after_a_refused_connection_a_change_goes_to_the_other_host(name: str, tmp_path: Path) -> None:
    losses = Losses()
    dead = f"127.0.0.1:{free_port()}"
    with losing(losses) as alive:
        for number, (one, other) in enumerate(((dead, alive), (alive, dead))):
            with proxied(name, tmp_path / f"{number}", one, other) as url:
                hosts = Hosts(url, losses)
                # In memory, and in a file of nginx's.
                for nbytes in (10, 3_000_000):
                    for method, target in (*CHANGES, *CHANGES):
                        answer, num_seen = hosts.send(method, target, b"x" * nbytes)
                        assert (answer.status, num_seen) == (200, 1)


def test_without_hosts_nginx_answers_a_change_with_503(tmp_path: Path) -> None:
    with proxied("nginx", tmp_path / "proxy", *(f"127.0.0.1:{free_port()}" for _ in range(2))) as url:
        answer, _ = Hosts(url, Losses()).send("PUT", "/v1/tensors/w", b"x")
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["detail"] == "no replica answers"
