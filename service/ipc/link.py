"""One end of the Unix socket between a gateway and an engine. Owns framing and coalescing.

Runs in an asyncio event loop. All messages that are sent in one turn of the loop leave in one write. Those that may wait leave
with the ones of some further turns.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from tilewire.service.ipc.messages import LENGTH_BYTES, FrameDecoder, encode_frame, encode_message

ReceivedT = TypeVar("ReceivedT")

# A first frame is one small message: more than this in one read is not a peer of ours.
HELLO_BYTES = 4096
# As many messages wait for no others: a write of more saves little.
MAX_GATHERED = 16


class Link(asyncio.Protocol, Generic[ReceivedT]):
    """A connection that carries messages both ways.

    Args:
        kind: The union of messages that the peer sends.
        on_message: Called for each, in order.
        on_lost: Called once when the connection is gone, whatever the cause.
    """

    def __init__(self, kind: Any, on_message: Callable[[ReceivedT], None], on_lost: Callable[[], None]) -> None:
        self._decoder: FrameDecoder[ReceivedT] = FrameDecoder(kind)
        self._on_message = on_message
        self._on_lost = on_lost
        self._outgoing: list[msgspec.Raw] = []
        self._turns_left = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were written and that the peer's socket has no room for yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's call: the socket is ours."""
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Asyncio's call: bytes came."""
        try:
            messages = self._decoder.feed(data)
        except ValueError:
            self.close()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's call: the peer is gone."""
        self._transport = None
        self._outgoing.clear()
        self._on_lost()

    def send(self, message: msgspec.Struct, turns: int = 0) -> None:
        """Sends with everything else that is sent until it leaves. Dropped when the link is closed.

        It may wait for others for further turns of the loop.

        Raises:
            Exception: It cannot be encoded; the others leave.
        """
        encoded = encode_message(message)
        if not self._outgoing:
            self._turns_left = turns
            self._loop.call_soon(self._gather)
        elif turns < self._turns_left:
            self._turns_left = turns
        self._outgoing.append(encoded)

    def _gather(self) -> None:
        if self._turns_left and len(self._outgoing) < MAX_GATHERED:
            self._turns_left -= 1
            # A callback that is due makes the loop poll its sockets without waiting for them.
            self._loop.call_soon(self._gather)
        else:
            self._flush()

    def close(self) -> None:
        """Closes the connection after what was sent has left."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self.is_open:
            assert self._transport is not None, "This is a bug."
            self._transport.write(encode_frame(outgoing))


def send_hello(sock: socket.socket, hello: msgspec.Struct, fd: int) -> None:
    """Sends a first message with a file descriptor beside it, before asyncio takes the socket.

    Raises:
        OSError: The peer is gone.
    """
    frame = encode_frame([hello])
    sent = socket.send_fds(sock, [frame], [fd])
    assert sent == len(frame), "This is a bug: a first message larger than an empty socket buffer."


async def receive_hello(sock: socket.socket, kind: Any) -> tuple[Any, int]:
    """Receives a first message and the file descriptor beside it from a non-blocking socket.

    Raises:
        ValueError: It is not one message with one descriptor.
        OSError: The peer is gone.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
    data, fds, _flags, _address = socket.recv_fds(sock, HELLO_BYTES, 1)
    messages = FrameDecoder[Any](kind).feed(data) if len(data) > LENGTH_BYTES else []
    if len(messages) != 1 or len(fds) != 1:
        raise ValueError("expected one message with one descriptor")
    return messages[0], fds[0]
