"""Ports that the supervisor keeps for its children."""

from __future__ import annotations

import asyncio
import socket

import pytest
import structlog

from tilewire.service.supervisor.listeners import PortTaken, bind_first, reserve

HOST = "127.0.0.1"


def listening(port: int, *options: int) -> socket.socket:
    """Listens as gRPC's library does, or another program."""
    door = socket.socket()
    try:
        for option in options:
            door.setsockopt(socket.SOL_SOCKET, option, 1)
        door.bind((HOST, port))
        door.listen()
    except OSError:
        door.close()
        raise
    return door


def test_a_reserved_port_is_for_who_binds_it_again() -> None:
    with reserve(HOST, 0) as kept:
        port = kept.getsockname()[1]
        # Before a gateway listens, while it does, and after it died.
        for _ in range(2):
            with pytest.raises(PortTaken):
                reserve(HOST, port)
            with listening(port, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                with pytest.raises(PortTaken):
                    reserve(HOST, port)
                socket.create_connection((HOST, port)).close()
    with reserve(HOST, port) as again:
        assert again.getsockname()[1] == port


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_a_port_where_somebody_listens_is_taken(options: tuple[int, ...]) -> None:
    with listening(0, *options) as door, pytest.raises(PortTaken):
        reserve(HOST, door.getsockname()[1])


def test_a_port_that_becomes_free_is_taken() -> None:
    door = listening(0, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
    port = door.getsockname()[1]

    async def run() -> int:
        asyncio.get_running_loop().call_later(0.2, door.close)
        with await bind_first(HOST, port, structlog.get_logger(), reserve) as kept:
            assert door.fileno() == -1
            return int(kept.getsockname()[1])

    assert asyncio.run(run()) == port
