"""A body over 2 GiB goes in and comes out byte for byte; with `LARGE_BODIES=1` only, because it takes 8 GB of memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from tests.conftest import StartServer
from tests.support.raw_http import RawConnection, head
from tests.support.tensor_bodies import sparse_npy

pytestmark = pytest.mark.skipif(os.environ.get("LARGE_BODIES") != "1", reason="LARGE_BODIES=1 is not set")

NBYTES = 2**31 + 2**27 + 5
# Around 2^31 and 2^32/2, where a length that is kept in 32 bits would break, and at both ends.
MARKS = {0: b"first", 2**31 - 3: b"middle", NBYTES - 5: b"final"}


@pytest.fixture
def body() -> Iterator[tuple[int, int]]:
    """A descriptor of an npy file, and its length."""
    with sparse_npy(NBYTES, MARKS) as file:
        yield file


@pytest.mark.timeout(600)
def test_over_two_gibibytes(start_server: StartServer, body: tuple[int, int]) -> None:
    fd, nbytes = body
    limits = ("--arena-bytes", "3GiB", "--max-body-bytes", "3GiB", "--resident-bytes", "3GiB")
    server = start_server("--gateways", "1", *limits)
    with server.connect(timeout_s=300) as sock:
        connection = RawConnection(sock)
        connection.send(head("PUT", "/v1/tensors/large", content_length=str(nbytes), content_type="application/x-npy"))
        with os.fdopen(os.dup(fd), "rb") as file:
            sock.sendfile(file, 0, nbytes)
        answer = connection.answer()
        assert answer.status == 201, answer.body
        assert answer.json()["bytes"] == NBYTES
        connection.send(head("GET", "/v1/tensors/large", accept="application/x-npy", connection="close"))
        assert received(sock, fd, nbytes) == nbytes


def received(sock: socket.socket, fd: int, nbytes: int) -> int:
    """Compares the answer with the file, piece by piece; returns how many bytes were equal."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(2**16)
    answer_head, _, data = data.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % nbytes in answer_head + b"\r\n"
    offset = 0
    while data:
        assert data == os.pread(fd, len(data), offset), offset
        offset += len(data)
        data = sock.recv(2**22)
    return offset
