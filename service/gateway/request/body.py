"""Receives a body into a leased slot. Owns lengths, chunks and the idle time-out; knows no format.

Under our own server a body of known length goes from the socket straight into the slot, through TLS too. Chunked
bodies and other servers take the plain ASGI path, which copies each piece once more.
"""

from __future__ import annotations

import asyncio

from tilewire.service.errors import BodyTooLarge, ClientGone, InvalidRequest, LengthRequired, UnknownFormat
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.context import Connection, Exchange
from tilewire.service.ipc.arena import Lease

# A chunked body does not say how long it is: its slot begins with this and doubles.
FIRST_CHUNKED_BYTES = 2**20


def refuse_encodings(exchange: Exchange) -> None:
    """For calls whose bodies come as they are.

    Raises:
        UnknownFormat: A content encoding.
    """
    encoding = exchange.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnknownFormat(f"Content-Encoding: {encoding[:64]!r} is not offered here; send the body as it is")


async def receive_body(
    exchange: Exchange, leases: Leases, max_bytes: int, timeout_s: float, *, lead_bytes: int = 0
) -> Lease:
    """Receives the whole body.

    Args:
        exchange: The request; its `received_bytes` is set.
        leases: Where the slot comes from.
        max_bytes: Largest body.
        timeout_s: Longest wait for the next byte.
        lead_bytes: Left free at the slot's start, so that what matters in the body begins aligned.

    Returns:
        A slot of exactly the body's length behind the lead.

    Raises:
        LengthRequired: Neither a length nor chunks.
        BodyTooLarge: Declared or grown over `max_bytes`; nothing was read when it was declared.
        TooBusy: No room within the time-out; nothing was read.
        InvalidRequest: The body stalled.
        ClientGone: The client left half way.
    """
    declared = exchange.content_length
    if exchange.is_chunked:
        return await _receive_chunked(exchange, leases, max_bytes, timeout_s, lead_bytes)
    if declared is None:
        raise LengthRequired("Content-Length: send it, or use chunked encoding")
    if declared > max_bytes:
        raise BodyTooLarge(f"Content-Length: {declared} is over the limit of {max_bytes} bytes")
    lease = await leases.wait(lead_bytes + declared)
    connection = exchange.incoming.connection
    if connection is not None and connection.can_receive_into:
        return await _receive_straight(exchange, connection, lease, timeout_s, lead_bytes)
    with lease.view[lead_bytes:] as slot:
        while not exchange.incoming.is_complete:
            await _receive_piece(exchange, slot, timeout_s)
    if exchange.received_bytes != declared:
        raise InvalidRequest(f"body: {exchange.received_bytes} bytes came; Content-Length said {declared}")
    return lease


async def _receive_straight(
    exchange: Exchange, connection: Connection, lease: Lease, timeout_s: float, lead_bytes: int
) -> Lease:
    exchange.incoming.was_read = True
    try:
        await connection.receive_into(lease.view[lead_bytes:], timeout_s)
    except ClientGone:
        exchange.incoming.is_disconnected = True
        raise
    finally:
        exchange.received_bytes = connection.received_bytes
    exchange.incoming.is_complete = True
    return lease


async def _receive_chunked(
    exchange: Exchange, leases: Leases, max_bytes: int, timeout_s: float, lead_bytes: int
) -> Lease:
    lease = await leases.wait(lead_bytes + min(FIRST_CHUNKED_BYTES, max_bytes))
    while not exchange.incoming.is_complete:
        piece = await _next_piece(exchange, timeout_s)
        begin = lead_bytes + exchange.received_bytes
        end = begin + len(piece)
        if end - lead_bytes > max_bytes:
            raise BodyTooLarge(f"body: over the limit of {max_bytes} bytes")
        if end > lease.nbytes:
            lease = await regrown(lease, leases, min(max(end, 2 * lease.nbytes), lead_bytes + max_bytes), begin)
        lease.view[begin:end] = piece
        exchange.received_bytes += len(piece)
    lease.shrink(lead_bytes + exchange.received_bytes)
    return lease


async def regrown(lease: Lease, leases: Leases, nbytes: int, kept_bytes: int) -> Lease:
    """Trades a slot for a larger one that begins with the same bytes.

    Raises:
        BodyTooLarge: The arena could never hold both.
        TooBusy: There was no room within the time-out.
    """
    larger = await leases.wait(nbytes)
    larger.view[:kept_bytes] = lease.view[:kept_bytes]
    leases.give_back(lease)
    return larger


async def _receive_piece(exchange: Exchange, slot: memoryview, timeout_s: float) -> None:
    piece = await _next_piece(exchange, timeout_s)
    end = exchange.received_bytes + len(piece)
    if end > len(slot):
        raise InvalidRequest(f"body: more than the {len(slot)} bytes that Content-Length said")
    slot[exchange.received_bytes : end] = piece
    exchange.received_bytes = end


async def _next_piece(exchange: Exchange, timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            message = await exchange.incoming()
    except TimeoutError:
        raise InvalidRequest(stalled(timeout_s, exchange.received_bytes)) from None
    if exchange.incoming.is_disconnected:
        raise ClientGone(f"the client left after {exchange.received_bytes} bytes of its body")
    piece: bytes = message.get("body", b"")
    return piece


def stalled(timeout_s: float, received_bytes: int) -> str:
    """The detail of a body that stopped coming."""
    return f"body: no byte for {timeout_s:g} s after {received_bytes}; the request was given up"
