"""A server that speaks the contract in this process, for the clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tilewire
from tests.unit.client.speaking_server import Call, SpeakingServer, caller, on_a_socket


@pytest.fixture
def server() -> SpeakingServer:
    return SpeakingServer()


@pytest.fixture
def url(server: SpeakingServer) -> Iterator[str]:
    with on_a_socket(server) as url:
        yield url


@pytest.fixture(params=["sockets", "asyncio sockets", "httpx", "asyncio httpx"])
def call(request: pytest.FixtureRequest, server: SpeakingServer) -> Iterator[Call]:
    """Calls a method of either client, by either transport."""
    kind = tilewire.AsyncClient if "asyncio" in request.param else tilewire.Client
    if "sockets" in request.param:
        with on_a_socket(server) as url:
            yield caller(kind, server, base_url=url, transport=None)
    else:
        yield caller(kind, server)
