"""Connections of a burst: even over gateways, all taken when one takes none, counted until they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.support.tls_server import make_certificates
from tilewire.service.gateway.connection.acceptor import Acceptor
from tilewire.service.gateway.connection.tls import Handshakes, TlsTransport
from tilewire.service.ipc.connection_counts import ConnectionCounts, create_counts

# Of the test that runs.
CLIENTS: list[socket.socket] = []


class Plain(asyncio.Protocol):
    """A connection that does nothing."""

    on_lost: Callable[[], None]

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_lost()


class Failing(socket.socket):
    """A listening socket on which no connection can be taken, at first.

    Attributes:
        error: Why not.
        failures: How many times.
        num_errors: How many times it was so already.
    """

    error, failures, num_errors = errno.EMFILE, 1, 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.num_errors < self.failures:
            self.num_errors += 1
            raise OSError(self.error, os.strerror(self.error))
        return super().accept()


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    async def close_after(**fixtures: Any) -> None:
        try:
            await asyncio.wait_for(test(**fixtures), 20)
        finally:
            # The loop would not end where a test fails and leaves connections.
            left = [client for client in CLIENTS if client.fileno() >= 0]
            CLIENTS.clear()
            for client in left:
                client.close()
            await asyncio.sleep(0.05 if left else 0)

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        uvloop.run(close_after(**fixtures))

    return run


@pytest.fixture
def page() -> Iterator[int]:
    fd = create_counts(4)
    yield fd
    os.close(fd)


@pytest.fixture
def doors() -> Iterator[list[socket.socket]]:
    """One listening socket with as many descriptors as there are processes: a loop has one reader of each."""
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.socket())
        door.bind(("127.0.0.1", 0))
        door.setblocking(False)
        yield [door, *(stack.enter_context(door.dup()) for _ in range(3))]


async def connect(door: socket.socket, count: int) -> list[socket.socket]:
    """Begins connections at once, as a pool does."""
    loop, clients = asyncio.get_running_loop(), [socket.socket() for _ in range(count)]
    for client in clients:
        client.setblocking(False)
    CLIENTS.extend(clients)
    await asyncio.gather(*(loop.sock_connect(client, door.getsockname()) for client in clients))
    return clients


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (nothing says so)
        await asyncio.sleep(0.001)


async def end(clients: list[socket.socket], acceptors: list[Acceptor], counts: list[ConnectionCounts]) -> None:
    """Closes everything; every connection is subtracted again."""
    for client in clients:
        client.close()
    await until(lambda: not any(one.own for one in counts))
    for acceptor in acceptors:
        acceptor.close()
        await acceptor.wait_closed()


@in_loop
async def test_a_burst_is_spread_evenly(page: int, doors: list[socket.socket]) -> None:
    counts = [ConnectionCounts(page, index) for index in range(4)]
    acceptors = [Acceptor(door, Plain, one) for door, one in zip(doors, counts, strict=True)]
    clients = await connect(doors[0], 80)
    await until(lambda: sum(one.own for one in counts) == 80)
    assert max(one.own for one in counts) <= 24
    await end(clients, acceptors, counts)


@in_loop
async def test_a_gateway_that_takes_none_costs_nobody_a_connection(page: int, doors: list[socket.socket]) -> None:
    counts = [ConnectionCounts(page, index) for index in range(4)]
    acceptors = [Acceptor(door, Plain, one) for door, one in zip(doors[:3], counts[:3], strict=True)]
    clients = await connect(doors[0], 200)
    begin_s = asyncio.get_running_loop().time()
    await until(lambda: sum(one.own for one in counts) == 200)
    assert asyncio.get_running_loop().time() - begin_s < 2
    assert counts[3].own == 0
    await end(clients, acceptors, counts)


@in_loop
async def test_those_that_are_not_ready_leave_connections_to_those_that_are(
    page: int, doors: list[socket.socket]
) -> None:
    counts = [ConnectionCounts(page, index) for index in range(4)]
    acceptors = [Acceptor(door, Plain, one) for door, one in zip(doors, counts, strict=True)]
    counts[2].set_ready(is_ready=True)
    clients = await connect(doors[0], 50)
    await until(lambda: counts[2].own == 50)
    # While none is ready, all take connections.
    counts[2].set_ready(is_ready=False)
    acceptors[2].close()
    clients += await connect(doors[0], 60)
    await until(lambda: sum(one.own for one in counts) == 110)
    await end(clients, acceptors, counts)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EPROTO])
@in_loop
async def test_a_connection_that_cannot_be_taken_ends_nothing(doors: list[socket.socket], error: int) -> None:
    door = Failing(fileno=doors[0].dup().detach())
    door.error = error
    counts = ConnectionCounts()
    acceptor = Acceptor(door, Plain, counts)
    clients = await connect(doors[0], 3)
    await until(lambda: counts.own == 3)
    assert door.num_errors == 1
    await end(clients, [acceptor], [counts])
    door.close()


@in_loop
async def test_connections_are_taken_soon_after_descriptors_are_free(
    doors: list[socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    """In a flood they come back at once, and probes of health wait meanwhile."""
    door = Failing(fileno=doors[0].dup().detach())
    door.failures = 40
    counts = ConnectionCounts()
    acceptor = Acceptor(door, Plain, counts)
    clients = await connect(doors[0], 1)
    await until(lambda: counts.own == 1)
    assert door.num_errors == 40
    # No line for each of them.
    assert 1 <= caplog.text.count("no connection can be taken") < 20
    await end(clients, [acceptor], [counts])
    door.close()


@in_loop
async def test_those_that_wait_are_taken_when_it_closes(page: int, doors: list[socket.socket]) -> None:
    counts = ConnectionCounts(page)
    acceptor = Acceptor(doors[0], Plain, counts)
    clients = [socket.create_connection(doors[0].getsockname()) for _ in range(5)]
    assert counts.own == 0
    acceptor.close()
    assert counts.own == 5
    await end(clients, [acceptor], [counts])


@in_loop
async def test_nothing_is_taken_once_closed(page: int, doors: list[socket.socket]) -> None:
    counts = ConnectionCounts(page)
    acceptor = Acceptor(doors[0], Plain, counts)
    acceptor.close()
    acceptor.close()
    (client,) = await connect(doors[0], 1)
    assert counts.own == 0
    other = ConnectionCounts(page, 1)
    successor = Acceptor(doors[1], Plain, other)
    await until(lambda: other.own == 1)
    await end([client], [successor], [other])


@in_loop
async def test_a_handshake_that_fails_is_subtracted(tmp_path: Path, doors: list[socket.socket]) -> None:
    certificates = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    counts = ConnectionCounts()
    acceptor = Acceptor(doors[0], lambda: TlsTransport(asyncio.Protocol(), context, 10, Handshakes()), counts)
    (client,) = await connect(doors[0], 1)
    await until(lambda: counts.own == 1)
    await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\n\r\n")
    await until(lambda: counts.own == 0)
    await end([client], [acceptor], [counts])
