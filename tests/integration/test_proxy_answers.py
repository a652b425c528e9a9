"""What nginx and HAProxy pass on and what they say by themselves, with the configurations of `deploy/`."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import haproxy, nginx
from tests.support.echo_server import echoing
from tests.support.live_server import LiveServer
from tests.support.raw_http import Answer, RawConnection, head
from tilewire.service.gateway.connection.limits import MAX_HEAD_BYTES

# Proxies in front of a server.
pytestmark = pytest.mark.slow

PROBLEM = "application/problem+json"
SPELLINGS = ("/metrics", "/%6detrics", "/%6Detric%73", "/m%65%74ri%63s", "/metrics?x=1", "/%6d%65%74%72%69%63%73?")
# As a proxy might read them; the service has nothing there.
NO_SPELLINGS = ("//metrics", "/./metrics", "/v1/../metrics", "/%2e/metrics", "/%2Fmetrics", "/%256detrics", "/METRICS")
TARGETS = (
    "/v1/tensors/weights%2Fw1",
    "/v1/tensors/a.b/..%2Fc",
    "/v1/tensors/.hidden/%2e%2E/x",
    "/v1/tensors//a//b/",
    "/v1/matmul?b=@weights%2Fw1&activation=gelu",
    "/v1/matmul?b=%40weights/w1&a=%2B+x",
)


@contextlib.contextmanager
def proxied(name: str, folder: Path, address: str) -> Iterator[str]:
    """A proxy in front of one address; yields its own."""
    folder.mkdir(exist_ok=True)
    if name == "nginx":
        with nginx.proxying(folder, (address, address)) as url:
            yield url
    else:
        with haproxy.proxying(folder, {1: address, 2: address}) as proxy:
            yield proxy.url


@pytest.fixture(scope="module", params=["nginx", "haproxy"])
def url(request: pytest.FixtureRequest, server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Each proxy in front of a server, one after the other."""
    folder = tmp_path_factory.mktemp("proxied")
    with proxied(request.param, folder, f"{server.host}:{server.port}") as url:
        yield url


def ask(url: str, sent: bytes) -> Answer:
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 0)
    with RawConnection(socket.create_connection(address, timeout=30)) as connection:
        connection.send(sent)
        return connection.answer()


def check_problem(answer: Answer, status: int) -> None:
    """An error as the API promises: `error` for clients of the Open Inference Protocol, the rest for others."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == PROBLEM
    body = answer.json()
    assert body["status"] == status
    assert all(body[name] for name in ("type", "title", "detail", "error"))


def test_metrics_are_not_offered_in_any_spelling(url: str, server: LiveServer) -> None:
    for spelling in SPELLINGS:
        assert ask(server.url, head("GET", spelling)).status == 200
        check_problem(ask(url, head("GET", spelling)), 404)
    for spelling in NO_SPELLINGS:
        assert ask(server.url, head("GET", spelling)).status == 404
        assert ask(url, head("GET", spelling)).status == 404


def long_head(nbytes: int, *, in_target: bool) -> bytes:
    """A request whose line and headers have this length together."""
    short = head("GET", "/v1/tensors?x=") if in_target else head("GET", "/v1/tensors", x_long="")
    more = "x" * (nbytes - len(short))
    return head("GET", f"/v1/tensors?x={more}") if in_target else head("GET", "/v1/tensors", x_long=more)


@pytest.mark.parametrize("in_target", [False, True], ids=["header", "query"])
def test_as_long_a_head_as_the_service_takes_reaches_it(url: str, server: LiveServer, *, in_target: bool) -> None:
    for nbytes in (9_000, 33_000, MAX_HEAD_BYTES - 256):
        sent = long_head(nbytes, in_target=in_target)
        straight = ask(server.url, sent)
        through = ask(url, sent)
        assert (through.status, through.body) == (straight.status, straight.body)
        assert "html" not in through.headers["content-type"]


def test_a_longer_head_is_refused_by_the_service(url: str) -> None:
    half = "x" * (MAX_HEAD_BYTES // 2)
    answer = ask(url, head("GET", "/v1/tensors", x_one=half, x_two=half))
    assert answer.status == 400
    assert str(MAX_HEAD_BYTES) in answer.json()["detail"]


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (400, b"garbage\r\n\r\n"),
        (400, head("GET", "/v1/tensors", host="another")),
        (400, head("GET", "/v1/tensors", x_long="x" * 100_000)),
        (400, head("POST", "/v1/add", content_length="many")),
        (404, head("GET", "/metrics")),
        (404, head("GET", "/nginx/refused")),
        (405, head("TRACE", "/")),
        (413, head("POST", "/v1/add", content_length=str(2**40))),
        (414, head("GET", f"/v1/tensors?{'x' * 100_000}")),
        (501, head("POST", "/v1/add", transfer_encoding="unknown")),
        (505, b"GET / HTTP/3.0\r\nhost: tests\r\n\r\n"),
    ],
)
def test_what_nginx_refuses_is_json(server: LiveServer, tmp_path: Path, status: int, sent: bytes) -> None:
    with nginx.proxying(tmp_path, [f"{server.host}:{server.port}"] * 2) as url:
        check_problem(ask(url, sent), status)


def test_all_that_haproxy_refuses_is_json() -> None:
    text = haproxy.TEMPLATE.read_text(encoding="utf-8")
    found = re.findall(rf"http-error status (\d+) content-type {re.escape(PROBLEM)} string '(.+?)'", text)
    assert len(found) == text.count("    http-error ")
    for status, body in found:
        check_problem(Answer(int(status), {"content-type": PROBLEM}, body.encode()), int(status))
    # Those that it makes in this configuration. Versions 2.6 to 3.2.2 do not read those for 400 and 408.
    assert {int(status) for status, _ in found} == {400, 404, 408, 500, 501, 502, 503, 504}


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_targets_and_hosts_reach_the_service_as_they_were_sent(name: str, tmp_path: Path) -> None:
    with echoing() as address, proxied(name, tmp_path / name, address) as url:
        for target in TARGETS:
            sent = head("GET", target).replace(b"host: tests", b"host: example.org:8443")
            assert ask(url, sent).json() == {"target": target, "host": "example.org:8443"}
