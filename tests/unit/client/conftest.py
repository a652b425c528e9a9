"""A server that speaks the contract in this process, for the clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.speaking_server import SpeakingServer, on_a_socket


@pytest.fixture
def server() -> SpeakingServer:
    return SpeakingServer()


@pytest.fixture
def url(server: SpeakingServer) -> Iterator[str]:
    with on_a_socket(server) as url:
        yield url
