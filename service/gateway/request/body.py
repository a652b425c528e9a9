"""Receives a body into a leased slot. Owns lengths, chunks and the idle time-out; the format is the API's.

A body of declared length goes straight into its slot. Chunked bodies are copied once more.
"""

from __future__ import annotations

import asyncio
import time

from tilewire.service.errors import BodyTooLarge, ClientGone, LengthRequired, UnknownFormat
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.context import Gateway, RequestContext
from tilewire.service.gateway.request.head import Head
from tilewire.service.ipc.arena import Lease

# A chunked body does not say how long it is: its slot begins with this and doubles.
FIRST_CHUNKED_BYTES = 2**20
# Payloads begin on this where we may choose. Unaligned ones are copied to the device in smaller words, and so is their batch.
ALIGN_BYTES = 64
# Bytes that are copied before others have their turn: about a millisecond.
COPY_BYTES = 2**22
# Time in which a rest of a body is discarded behind the answer: closing at once would lose the client its answer.
LINGER_S = 2.0
# Values of `Content-Encoding` of a body that comes as it is: an empty list of codings, and a list of none that changes it.
NO_CODING = ("", "identity")
# Largest JSON text of a call that moves no tensor.
MAX_TEXT_BYTES = 2**16


def refuse_encodings(head: Head) -> None:
    """For calls whose bodies come as they are.

    Raises:
        UnknownFormat: A content encoding.
    """
    encoding = head.headers.get("content-encoding", "").strip().lower()
    if encoding not in NO_CODING:
        raise UnknownFormat(f"Content-Encoding: {encoding[:64]!r} is not offered here; send the body as it is")


async def receive_body(
    gateway: Gateway,
    context: RequestContext,
    leases: Leases,
    max_bytes: int,
    pad_bytes: int = 0,
    spare_bytes: int = 0,
) -> Lease:
    """Receives the whole body, and measures how long that takes.

    Args:
        gateway: Parts.
        context: The request.
        leases: Source of the slot.
        max_bytes: Largest body.
        pad_bytes: Bytes left free at the slot's start, so that what matters in the body begins aligned.
        spare_bytes: Room behind the body, if there is plenty.

    Returns:
        A slot of exactly the body's length behind the free bytes.

    Raises:
        LengthRequired: Neither a length nor chunks.
        BodyTooLarge: Declared or grown over `max_bytes`; nothing was read when it was declared.
        TooBusy: No room within the time-out; nothing was read.
        InvalidRequest: The body stalled.
        ClientGone: The client left half way.
    """
    head, timeout_s = context.head, gateway.settings.body_timeout_s
    context.receive_began_s = time.perf_counter()
    # Before, not after: a body that comes slowly holds its slot all the while.
    gateway.metrics.observe_load()
    if head.is_chunked:
        lease = await _receive_chunked(gateway, context, leases, max_bytes, pad_bytes)
        context.receive_s = time.perf_counter() - context.receive_began_s
        return lease
    declared = head.content_length
    if declared is None:
        raise LengthRequired("Content-Length: send it, or use chunked encoding")
    if declared > max_bytes:
        raise BodyTooLarge(f"Content-Length: {declared} is over {_limit(gateway, max_bytes)}")
    lease = leases.take_now(pad_bytes + declared, spare_bytes) or await leases.wait(pad_bytes + declared)
    slot = lease.view
    rest = context.stream.receive_into(slot[pad_bytes:] if pad_bytes else slot, timeout_s)
    if rest is not None:
        await rest
    context.receive_s = time.perf_counter() - context.receive_began_s
    return lease


def _limit(gateway: Gateway, max_bytes: int) -> str:
    setting = ", --max-body-bytes" if max_bytes == gateway.settings.max_body_bytes else ""
    return f"the limit of {max_bytes} bytes{setting}"


async def _receive_chunked(
    gateway: Gateway, context: RequestContext, leases: Leases, max_bytes: int, pad_bytes: int
) -> Lease:
    stream, timeout_s = context.stream, gateway.settings.body_timeout_s
    lease = await leases.wait(pad_bytes + min(FIRST_CHUNKED_BYTES, max_bytes))
    is_last = False
    while not is_last:
        piece = await stream.receive_piece(timeout_s)
        if stream.is_disconnected:
            raise ClientGone(f"the client left after {context.received_bytes} bytes of its body")
        is_last = stream.is_complete
        if context.received_bytes > max_bytes:
            raise BodyTooLarge(f"body: over {_limit(gateway, max_bytes)}")
        begin = pad_bytes + context.received_bytes - len(piece)
        lease = await append(lease, leases, piece, begin, pad_bytes + max_bytes)
    lease.shrink(pad_bytes + context.received_bytes)
    return lease


async def append(lease: Lease, leases: Leases, piece: bytes, begin: int, max_bytes: int) -> Lease:
    """Writes a piece at `begin`, behind others; trades the slot for a larger one of at most `max_bytes` when it is full.

    Raises:
        BodyTooLarge: The arena could never hold both.
        TooBusy: There was no room within the time-out.
    """
    end = begin + len(piece)
    if end > lease.nbytes:
        full, lease = lease, await leases.wait(min(max(end, 2 * lease.nbytes), max_bytes))
        for at in range(0, begin, COPY_BYTES):
            up_to = min(at + COPY_BYTES, begin)
            lease.view[at:up_to] = full.view[at:up_to]
            await asyncio.sleep(0)
        leases.give_back(full)
    lease.view[begin:end] = piece
    return lease


def stalled(timeout_s: float, received_bytes: int) -> str:
    """The detail of a body that stopped coming."""
    return f"body: no byte for {timeout_s:g} s after {received_bytes}; the request was given up"


def cut_short(received_bytes: int) -> str:
    """The detail of a body whose client ends its side before all of it has come."""
    return f"body: the client ended its side after {received_bytes} bytes, before the end of the body"


def too_slow(min_bytes_per_s: int, received_bytes: int) -> str:
    """The detail of a body that trickles in."""
    return f"body: {received_bytes} bytes had come, slower than {min_bytes_per_s} bytes/s; the request was given up"


async def receive_text(gateway: Gateway, context: RequestContext) -> bytes:
    """Receives the body of a call that moves no tensor; nothing where the request has none.

    Raises:
        BodyTooLarge: More than 64 KiB.
        TooBusy: No room within the time-out.
        InvalidRequest: The body stalled.
    """
    if not context.head.is_chunked and not context.head.content_length:
        return b""
    with gateway.admission.admit(context.flow) as leases:
        return bytes((await receive_body(gateway, context, leases, MAX_TEXT_BYTES)).view)
