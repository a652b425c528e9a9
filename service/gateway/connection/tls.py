"""Speaks TLS between a socket's transport and a connection. Runs in the gateway's event loop.

The TLS layers of asyncio and uvloop close a connection when its client ends its side of it (`close_notify`). Here the protocol
decides, as it does without TLS: a whole request is still answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from tilewire.service.gateway.connection.limits import TCP_CLOSE, TCP_CLOSE_WAIT, tcp_state

# Most bytes that are taken from the socket at once; whoever has the loop decrypts them before another connection has its turn.
READ_BYTES = 2**18
# Bytes that are taken at once unless those before were mostly data, and after which a connection without data is closed. A
# record has half as many, and a handshake with three certificates a quarter. A change of keys has 27 bytes and takes 6 µs:
# READ_BYTES of them are 60 ms for everybody else. A client's certificates take 45 ms where there are 280 of them.
FEW_BYTES = 2**15

# Connections share it: what was read is used up at once.
_scratch = memoryview(bytearray(READ_BYTES))


class Handshakes:
    """The handshakes of a gateway. In each turn of the loop one goes on, for 0.3 ms: a thousand clients may come at once."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, step: Callable[[], None]) -> None:
        """Adds a step behind all that wait."""
        self._waiting.append(step)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        step = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._take)
        step()


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """Transport of a protocol above it, and protocol of the transport of a socket below it.

    Args:
        protocol: Protocol above; it gets its connection after the handshake, and then reads into its own buffers.
        context: Certificate and versions.
        handshake_s: Longest time for the handshake, in seconds.
        handshakes: Those of the gateway.

    Attributes:
        on_lost: Called when the connection is gone.
    """

    on_lost: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, protocol: asyncio.BaseProtocol, context: ssl.SSLContext, handshake_s: float, handshakes: Handshakes
    ) -> None:
        super().__init__()
        self._protocol: asyncio.BaseProtocol | None = protocol
        self._context = context
        self._handshake_s = handshake_s
        self._handshakes = handshakes
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        # Our part of the handshake was sent: what the client sends then may be all that it has to say.
        self._is_answered = False
        self._is_open = self._is_closing = self._is_paused = False
        # Bytes that may come at once, data among those that came last, and bytes that came since the last data.
        self._read_bytes, self._data_bytes, self._useless_bytes = FEW_BYTES, 0, 0
        # The client has ended its side, or we ended ours; and nothing more comes from below.
        self._has_ended = self._have_ended = self._is_all_there = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's call: a client connected."""
        self._below = cast("asyncio.Transport", transport)
        self._timer = self._loop.call_later(self._handshake_s, self.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Asyncio's call: where the next bytes go."""
        return _scratch[: self._read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Asyncio's call: bytes came; those behind the end of our side are dropped, and would only be an error of TLS."""
        if self._have_ended:
            return
        self._incoming.write(_scratch[:nbytes])
        if self._is_open:
            self._use(nbytes, self._read)
        else:
            # What comes next waits below.
            self._below.pause_reading()
            self._handshakes.add(partial(self._go_on, nbytes))

    def _go_on(self, nbytes: int) -> None:
        """It is the turn of this handshake."""
        if self.is_closing():
            return
        self._use(nbytes, self._shake_hands)
        if not (self._is_paused or self.is_closing()):
            self._below.resume_reading()

    def _use(self, nbytes: int, work: Callable[[], None]) -> None:
        """Has bytes decrypted; closes a connection of too many without data."""
        was_open, self._data_bytes = self._is_open, 0
        work()
        is_data = 2 * self._data_bytes >= nbytes >= FEW_BYTES
        self._read_bytes = READ_BYTES if is_data else FEW_BYTES
        if self._data_bytes or self._is_open is not was_open:
            self._useless_bytes = 0
        elif not self._is_paused:
            self._useless_bytes += nbytes
            if self._useless_bytes >= FEW_BYTES:
                self._fail()

    def eof_received(self) -> bool:
        """Asyncio's call: the client sends nothing more. What came before may still be unread, behind requests under way."""
        self._is_all_there = True
        if self._is_open:
            self._read()
        return self._is_open and not (self._is_closing or self._have_ended)

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's call: the connection is gone."""
        self._is_closing = True
        self._timer.cancel()
        # They would wait for each other and for the garbage collector.
        protocol, self._protocol = self._protocol, None
        if self._is_open and protocol is not None:
            protocol.connection_lost(exc)
        self.on_lost()

    def pause_writing(self) -> None:
        """Asyncio's call: the client reads more slowly than we write."""
        if self._is_open and self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Asyncio's call: the client reads again."""
        if self._is_open and self._protocol is not None:
            self._protocol.resume_writing()

    def _shake_hands(self) -> None:
        # What came before the end of a connection is still read. A handshake takes 0.3 ms, and others wait to be accepted.
        state = tcp_state(self._below.get_extra_info("socket"))
        if state == TCP_CLOSE or (state == TCP_CLOSE_WAIT and not self._is_answered):
            self.abort()
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._is_answered |= self._outgoing.pending > 0
            self._flush()
            return
        except (ssl.SSLError, OSError):
            self._fail()
            return
        self._timer.cancel()
        self._is_open = True
        self._flush()
        assert self._protocol is not None, "This is a bug."
        self._protocol.connection_made(self)
        self._read()

    def _read(self) -> None:
        """Decrypts what has come, as far as the protocol takes it."""
        while not (self._is_paused or self._has_ended or self._have_ended or self.is_closing()):
            protocol = cast("asyncio.BufferedProtocol", self._protocol)
            try:
                nbytes = self._decrypt(memoryview(protocol.get_buffer(-1)))
            except ssl.SSLZeroReturnError:
                self._end()
                break
            except ssl.SSLError:
                self._fail()
                return
            if nbytes:
                self._data_bytes += nbytes
                protocol.buffer_updated(nbytes)
                continue
            if self._is_all_there:
                self._end()
            break
        self._flush()

    def _decrypt(self, buffer: memoryview) -> int:
        """Fills a buffer as far as bytes have come; an SSLZeroReturnError where none came before the client's end."""
        filled = 0
        while filled < len(buffer):
            try:
                # With a buffer it returns a number, whatever its type says.
                nbytes = cast("int", self._tls.read(len(buffer) - filled, buffer[filled:]))
            except ssl.SSLWantReadError:
                break
            if nbytes:
                filled += nbytes
            elif filled:
                break
            else:
                raise ssl.SSLZeroReturnError
        return filled

    def _end(self) -> None:
        """The client sends nothing more; the protocol decides whether it is still answered."""
        if self._has_ended or self._is_closing:
            return
        self._has_ended = True
        if not cast("asyncio.BufferedProtocol", self._protocol).eof_received():
            self.close()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._below.is_closing():
            self._below.write(self._outgoing.read())

    def _fail(self) -> None:
        """Closes after an error of TLS; the alert that names it goes to the client."""
        self._is_closing = True
        self._flush()
        self._below.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypts and sends bytes, all at once."""
        if self._is_closing or self._have_ended:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError:
            self._fail()
            return
        self._flush()

    def can_write_eof(self) -> bool:
        """Returns that this side can be ended alone."""
        return True

    def write_eof(self) -> None:
        """Ends this side; what the client sends is taken and dropped."""
        self._end_ours()
        if self._below.can_write_eof():
            self._below.write_eof()

    def close(self) -> None:
        """Closes when what was written has left."""
        if not self._is_closing:
            self._end_ours()
            self._is_closing = True
            self._below.close()

    def abort(self) -> None:
        """Closes at once."""
        self._is_closing = True
        self._below.abort()

    def _end_ours(self) -> None:
        if self._is_open and not self._have_ended:
            self._have_ended = True
            # It sends `close_notify`, and then misses the client's. Data in its place ends TLS: nothing is decrypted after it.
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._is_closing or self._below.is_closing()

    def pause_reading(self) -> None:
        """Reads nothing until `resume_reading`."""
        self._is_paused = True
        if not self.is_closing():
            self._below.pause_reading()

    def resume_reading(self) -> None:
        """Reads on, first what has come already."""
        self._is_paused = False
        if not self.is_closing():
            self._below.resume_reading()
            self._loop.call_soon(self._read)

    def get_write_buffer_size(self) -> int:
        """Number of encrypted bytes that have not left."""
        return self._below.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Sets when the protocol is paused."""
        self._below.set_write_buffer_limits(high, low)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Replaces the protocol above."""
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Facts about the connection: those of TLS, or of the socket."""
        if name == "sslcontext":
            return self._context
        return self._tls if name == "ssl_object" else self._below.get_extra_info(name, default)
