"""Framing through proxies: what nginx and HAProxy take for one request, this server takes for one, with the same body.

Each case of HTTP/1.1 goes through a proxy that keeps its connections to the server and hands them from client to client. Its
requests carry an id. The server may log no more requests of that id than were sent, and no other client may get their answers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import SMALL
from tests.support.http11_cases import CASES, Case, Target
from tests.support.http11_probe import Observation, play
from tests.support.live_server import LiveServer, serving
from tests.support.programs import find_program, free_port, running
from tests.support.raw_http import RawConnection, post

pytestmark = pytest.mark.slow

NGINX = """
worker_processes 1; daemon off; error_log stderr crit; pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies; proxy_temp_path {folder}/answers; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream server {{ server 127.0.0.1:{backend}; keepalive 1; }}
    server {{
        listen 127.0.0.1:{port};
        client_body_timeout 1s; client_header_timeout 1s;
        location / {{
            proxy_pass http://server; proxy_http_version 1.1; proxy_request_buffering off; proxy_set_header Connection "";
        }}
    }}
}}
"""
HAPROXY = """
global
    maxconn 256
defaults
    mode http
    timeout connect 2s
    timeout client 1s
    timeout server 10s
    timeout http-request 1s
frontend clients
    bind 127.0.0.1:{port}
    default_backend server
backend server
    http-reuse always
    server one 127.0.0.1:{backend} pool-max-conn 1
"""
COMMANDS = {
    "nginx": (NGINX, ("-p", "{folder}", "-c", "{config}", "-e", "stderr")),
    "haproxy": (HAPROXY, ("-f", "{config}", "-db")),
}
GOOD = '{"x":[0, 1]}'
# A request is logged a moment after its answer.
LOGGED_S = 10.0


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of one gateway that logs each request."""
    flags = ("--access-log", "--log-format", "json", "--body-timeout-s", "1")
    with serving(tmp_path_factory.mktemp("framing") / "log", *SMALL, *flags) as server:
        yield server


@contextlib.contextmanager
def proxied(name: str, backend: int, folder: Path) -> Iterator[int]:
    """The port of a proxy in front of the server."""
    program, port = find_program(name), free_port()
    text, words = COMMANDS[name]
    config = folder / f"{name}.conf"
    config.write_text(text.format(folder=folder, backend=backend, port=port), encoding="utf-8")
    command = [program, *(word.format(folder=folder, config=config) for word in words)]
    with running(command, folder / f"{name}.log", port):
        yield port


def num_logged(log: Path) -> Counter[str]:
    """Requests that the server logged, by the id that they came with."""
    ids = [json.loads(line).get("request_id", "") for line in log.read_text().splitlines() if '"request_id"' in line]
    return Counter(ids)


def target_of(port: int, request_id: str) -> Target:
    """Cases for this server; each of their requests carries the id behind its Host."""
    host = f"127.0.0.1:{port}\r\nX-Request-Id: {request_id}"
    return Target(host, "/healthz", "/v1/softmax", "/v2/repository/index")


def check_stranger(port: int, number: int) -> None:
    """A client that comes next gets the answer to its own request."""
    with RawConnection(socket.create_connection(("127.0.0.1", port), timeout=10)) as stranger:
        stranger.send(
            post("/v1/softmax", GOOD.encode(), content_type="application/json", x_request_id=f"stranger-{number}")
        )
        answer = stranger.answer()
    assert answer.status == 200, answer
    assert answer.headers["x-request-id"] == f"stranger-{number}"
    assert len(answer.json()["out"]) == 2


def bodies(seen: Observation) -> list[bytes]:
    return [answer.body for answer in seen.answers if answer.status == 200]


def check_case(case: Case, server: LiveServer, port: int, number: int) -> None:
    """A case straight to the server and through the proxy has the same answer, and harms nobody."""
    straight = play(case, (server.host, server.port), target_of(server.port, f"straight-{number}"))
    through = play(case, ("127.0.0.1", port), target_of(port, f"through-{number}"))
    if bodies(straight) and bodies(through) and case.sends[0].startswith("POST <post>"):
        assert bodies(straight)[0] == bodies(through)[0], case.name
    check_stranger(port, number)


@pytest.mark.parametrize("name", COMMANDS)
def test_requests_have_the_same_bounds(logged: LiveServer, tmp_path: Path, name: str) -> None:
    # What waits for more is waited for by nobody here.
    cases = [replace(case, rule=replace(case.rule, passes=case.rule.passes | {"wait"})) for case in CASES.values()]
    first = len(num_logged(logged.log))
    with proxied(name, logged.port, tmp_path) as port, ThreadPoolExecutor(8) as pool:
        checks = [pool.submit(check_case, case, logged, port, number) for number, case in enumerate(cases, first)]
        for check in checks:
            check.result()
    counted, end_s = num_logged(logged.log), time.monotonic() + LOGGED_S
    while any(not counted[f"stranger-{number}"] for number, _ in enumerate(cases, first)) and time.monotonic() < end_s:
        time.sleep(0.05)
        counted = num_logged(logged.log)
    for number, case in enumerate(cases, first):
        assert counted[f"stranger-{number}"] == 1
        for way in ("straight", "through"):
            assert counted[f"{way}-{number}"] <= len(case.sends), (case.name, way)
