"""Writes answers to a transport: in few calls, in pieces after which others have their turn, and until all of it has left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence

from tilewire.service.gateway.connection.receive import Connection

# The unsent rest of an answer up to this size is copied out of its slot, so that no client holds the slot.
COPIED_BYTES = 2**18
# Bytes written at once, by TLS encrypted at once; nobody else is served meanwhile. The system takes a write of any length in
# one call where the client reads as fast as it is written.
PIECE_BYTES = 2**20
TLS_PIECE_BYTES = 2**18


def write_answer(owner: Connection, head: bytes, chunks: Sequence[bytes | memoryview]) -> Awaitable[None] | None:
    """Writes head and body, at once as far as the system takes them.

    Returns:
        None when the chunks are not needed any more: they have left, or were copied. Else what ends when everything has
        left, or the client.
    """
    transport = owner.transport
    nbytes, sent = len(head), 0
    for chunk in chunks:
        nbytes += len(chunk)
    if owner.fd >= 0 and nbytes <= PIECE_BYTES and not transport.get_write_buffer_size():
        try:
            sent = os.writev(owner.fd, (head, *chunks))
        except OSError:
            # Nothing is taken now; an error is left for the transport to find.
            sent = 0
        if sent == nbytes:
            return None
    if nbytes > COPIED_BYTES:
        return _write_rest(owner, (head, *chunks), sent)
    transport.write(b"".join((head, *chunks))[sent:])
    return None


async def _write_rest(owner: Connection, chunks: Sequence[bytes | memoryview], sent: int) -> None:
    """Writes what is left of an answer, straight from its slot."""
    transport = owner.transport
    piece_bytes = PIECE_BYTES if owner.fd >= 0 else TLS_PIECE_BYTES
    for chunk in chunks:
        rest = memoryview(chunk)[sent:]
        sent = max(0, sent - len(chunk))
        for at in range(0, len(rest), piece_bytes):
            if owner.flow.write_paused:
                await owner.flow.drain()
            if transport.is_closing():
                return
            transport.write(rest[at : at + piece_bytes])
            # Others have their turn.
            await asyncio.sleep(0)
    await flushed(owner)


async def flushed(owner: Connection) -> None:
    """Returns when everything that was written has left, or the client has."""
    transport = owner.transport
    if transport.is_closing() or not transport.get_write_buffer_size():
        return
    # Without room for buffering, the transport says that it is writable only when its buffer is empty.
    transport.set_write_buffer_limits(high=0)
    await owner.flow.drain()
    if not transport.is_closing():
        transport.set_write_buffer_limits()
