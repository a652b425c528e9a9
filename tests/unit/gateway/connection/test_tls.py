"""TLS between a socket and a protocol: what the protocol sees, and what a client can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvloop

from tests.support.key_changes import KeyChanges
from tests.support.tls_server import Certificates, make_certificates
from tilewire.service.gateway.connection.tls import FEW_BYTES, READ_BYTES, Handshakes, TlsTransport

HANDSHAKE_S = 0.2


class Recorder(asyncio.BufferedProtocol):
    """Keeps what it reads, some bytes at a time, and stays when the client ends its side."""

    def __init__(self) -> None:
        self.transport: TlsTransport | None = None
        self.buffer = bytearray(1000)
        self.data = bytearray()
        self.came, self.has_ended, self.is_gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_paused, self.is_resumed = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("TlsTransport", transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]
        self.came.set()

    def eof_received(self) -> bool:
        self.has_ended.set()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone.set()

    def pause_writing(self) -> None:
        self.is_paused.set()

    def resume_writing(self) -> None:
        self.is_resumed.set()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in the event loop of a gateway, for at most twenty seconds."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        uvloop.run(asyncio.wait_for(test(**fixtures), 20))

    return run


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def served(
    certificates: Certificates, recorder: Recorder | None = None, handshake_s: float = HANDSHAKE_S
) -> AsyncIterator[tuple[Recorder, int]]:
    """The protocol of the next connection, and the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    recorder, handshakes = recorder or Recorder(), Handshakes()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: TlsTransport(recorder, context, handshake_s, handshakes), "127.0.0.1", 0)
    try:
        yield recorder, server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def until(data: bytes, recorder: Recorder) -> TlsTransport:
    """Waits until the protocol has read this; returns its transport."""
    while recorder.data != data:
        recorder.came.clear()
        await recorder.came.wait()
    assert recorder.transport is not None
    return recorder.transport


@in_loop
async def test_bytes_arrive_whole_over_small_buffers(certificates: Certificates) -> None:
    sent = bytes(range(256)) * 4096
    async with served(certificates) as (recorder, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=certificates.context())
        writer.write(sent)
        transport = await until(sent, recorder)
        assert transport.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert transport.get_extra_info("peername")[0] == "127.0.0.1"
        transport.write(memoryview(sent))
        assert await reader.readexactly(len(sent)) == sent
        writer.close()
        await recorder.has_ended.wait()
        assert not transport.is_closing()
        transport.close()
        await recorder.is_gone.wait()


@in_loop
async def test_a_paused_protocol_reads_nothing_and_later_all(certificates: Certificates) -> None:
    sent = bytes(3 * READ_BYTES)
    async with served(certificates) as (recorder, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=certificates.context())
        writer.write(b"x")
        transport = await until(b"x", recorder)
        transport.pause_reading()
        writer.write(sent)
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert recorder.data == b"x"
        transport.resume_reading()
        await until(b"x" + sent, recorder)
        transport.abort()
        writer.close()


@in_loop
async def test_a_connection_that_changes_its_keys_and_nothing_else_is_closed(certificates: Certificates) -> None:
    """Each change costs 6 µs, in which nobody else is answered."""
    client = KeyChanges()
    async with served(certificates) as (recorder, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(client.shake_hands(b""))
            while not client.is_open:
                writer.write(client.shake_hands(await reader.read(2**16)))
            for number in range(1, 4):
                writer.write(client.change(FEW_BYTES // 50) + client.write(b"x"))
                await until(b"x" * number, recorder)
            writer.write(client.change(FEW_BYTES // 10))
            async with asyncio.timeout(5):
                await recorder.is_gone.wait()
        finally:
            writer.transport.abort()


def hello_of(certificates: Certificates) -> bytes:
    """What a client sends first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        certificates.context().wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


@in_loop
async def test_a_client_that_has_left_costs_no_handshake(certificates: Certificates) -> None:
    names: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    context.sni_callback = lambda _tls, name, _context: names.append(name)
    with socket.create_server(("127.0.0.1", 0)) as door:
        for end in ("none", "close", "reset"):
            with socket.create_connection(door.getsockname()) as client:
                client.sendall(hello_of(certificates))
                if end == "reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if end != "none":
                    client.close()
                accepted, _ = door.accept()
                accepted.setblocking(False)
                transport = TlsTransport(Recorder(), context, HANDSHAKE_S, Handshakes())
                is_lost = asyncio.Event()
                transport.on_lost = is_lost.set
                await asyncio.get_running_loop().connect_accepted_socket(functools.partial(_same, transport), accepted)
                await is_lost.wait()
            assert names == ["localhost"], end


@in_loop
async def test_a_client_that_ends_its_side_with_its_first_request_is_answered(certificates: Certificates) -> None:
    for first in (0, 10):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = certificates.context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        loop = asyncio.get_running_loop()
        async with served(certificates) as (recorder, port):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.setblocking(False)
                while True:
                    try:
                        tls.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        await loop.sock_sendall(sock, outgoing.read())
                        incoming.write(await loop.sock_recv(sock, 2**16))
                # The end of the handshake may come in two pieces, to the first of which there is no answer.
                sock.send(outgoing.read(first))
                for _ in range(20):
                    await asyncio.sleep(0)
                # The rest before the loop has its next turn.
                tls.write(b"x")
                sock.send(outgoing.read())
                sock.shutdown(socket.SHUT_WR)
                transport = await until(b"x", recorder)
                transport.close()


class Wire(asyncio.Transport):
    """Transport below, whose bytes come all at once."""

    def __init__(self, sock: socket.socket, turns: list[int]) -> None:
        super().__init__()
        self._sock, self._turns = sock, turns
        self.reads, self.is_gone = True, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._turns[-1] += 1

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._sock if name == "socket" else default

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.is_gone


@in_loop
async def test_of_handshakes_that_come_at_once_one_goes_on_in_each_turn_of_the_loop(certificates: Certificates) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    handshakes, hello, answers = Handshakes(), hello_of(certificates), [0]
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as sock:
        wires = [Wire(sock, answers) for _ in range(20)]
        for wire in wires:
            transport = TlsTransport(Recorder(), context, HANDSHAKE_S, handshakes)
            transport.connection_made(wire)
            transport.get_buffer(-1)[: len(hello)] = hello
            transport.buffer_updated(len(hello))
            assert not wire.reads
        # One leaves meanwhile.
        wires[7].is_gone = True
        for _ in range(25):
            answers.append(0)
            await asyncio.sleep(0)
    assert sum(answers) == 19
    assert max(answers) == 1
    assert [wire.reads for wire in wires] == [not wire.is_gone for wire in wires]


def _same(transport: TlsTransport) -> TlsTransport:
    return transport


@in_loop
async def test_a_handshake_that_goes_on_and_on_is_given_up(certificates: Certificates) -> None:
    """As one with hundreds of certificates, which take long to look through."""
    hello = b"\x01" + (2 * FEW_BYTES).to_bytes(3) + bytes(2 * FEW_BYTES)
    async with served(certificates, handshake_s=60) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for begin in range(0, FEW_BYTES, 2**14):
                writer.write(b"\x16\x03\x01" + (2**14).to_bytes(2) + hello[begin : begin + 2**14])
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(5):
                    await reader.read()
        finally:
            writer.transport.abort()


class Pausing(Recorder):
    """Takes one buffer, and no more until it is resumed: as a connection does behind each request."""

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        assert self.transport is not None
        self.transport.pause_reading()


@pytest.mark.parametrize("says_goodbye", [False, True])
@in_loop
async def test_what_came_before_the_end_is_read_before_it(certificates: Certificates, says_goodbye: bool) -> None:
    sent = bytes(range(250)) * 40
    async with served(certificates, Pausing()) as (recorder, port):
        sock = socket.create_connection(("127.0.0.1", port))
        tls = await asyncio.to_thread(certificates.context().wrap_socket, sock, server_hostname="127.0.0.1")
        plain = socket.socket(fileno=os.dup(tls.fileno()))
        await asyncio.to_thread(tls.sendall, sent)
        if says_goodbye:
            tls.setblocking(False)
            with pytest.raises(ssl.SSLWantReadError):
                tls.unwrap()
        plain.shutdown(socket.SHUT_WR)
        while not recorder.has_ended.is_set():
            await asyncio.sleep(0.001)
            if recorder.transport is not None:
                recorder.transport.resume_reading()
        assert recorder.data == sent
        assert recorder.transport is not None
        recorder.transport.write(b"still answered")
        assert await asyncio.to_thread(tls_rest, tls) == b"still answered"
        recorder.transport.close()
        plain.close()
        tls.close()


def tls_rest(tls: ssl.SSLSocket) -> bytes:
    """What a client reads next."""
    tls.setblocking(True)
    return tls.recv(100)


@in_loop
async def test_writing_is_paused_while_the_client_does_not_read(certificates: Certificates) -> None:
    async with served(certificates) as (recorder, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=certificates.context(), limit=2**10)
        writer.write(b"x")
        transport = await until(b"x", recorder)
        transport.write(bytes(2**25))
        assert recorder.is_paused.is_set()
        assert transport.get_write_buffer_size() > 0
        assert len(await reader.readexactly(2**25)) == 2**25
        await recorder.is_resumed.wait()
        transport.write_eof()
        transport.write(b"dropped")
        assert await reader.read() == b""
        transport.close()
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "a part", "no TLS"])
@in_loop
async def test_a_handshake_that_does_not_come_ends_the_connection(certificates: Certificates, sent: bytes) -> None:
    async with served(certificates) as (recorder, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        try:
            # An alert at most.
            assert len(await reader.read()) < 16
        except ConnectionResetError:
            assert not sent.startswith(b"GET")
        writer.close()
    assert recorder.transport is None
    assert not recorder.is_gone.is_set()


@in_loop
async def test_what_is_no_tls_behind_the_handshake_ends_the_connection(certificates: Certificates) -> None:
    async with served(certificates) as (recorder, port):
        sock = socket.create_connection(("127.0.0.1", port))
        tls = await asyncio.to_thread(certificates.context().wrap_socket, sock, server_hostname="127.0.0.1")
        plain = socket.socket(fileno=os.dup(tls.fileno()))
        await asyncio.to_thread(tls.sendall, b"x")
        await until(b"x", recorder)
        plain.sendall(b"this is no record of TLS")
        await recorder.is_gone.wait()
        plain.close()
        tls.close()
