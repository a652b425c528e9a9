"""Compresses answers and inflates bodies: gzip and deflate.

Owns the choice of a coding from Accept-Encoding and the bound on an inflated body. Runs in a gateway's event loop;
long work runs in a thread, where zlib holds no lock.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Literal

from tilewire.service.errors import BodyTooLarge, InvalidRequest, UnknownFormat
from tilewire.service.gateway.request.admission import Leases
from tilewire.service.gateway.request.body import NO_CODING, append
from tilewire.service.gateway.request.offload import offload
from tilewire.service.ipc.arena import Lease

Coding = Literal["gzip", "deflate"]

# zlib's window bits: with a gzip frame, and with a zlib frame, which is what HTTP calls deflate.
_WBITS: dict[Coding, int] = {"gzip": 31, "deflate": 15}
# Tensors hardly shrink, and the fastest level gets most of it.
LEVEL = 1
FED_BYTES, STEP_BYTES = 2**18, 2**20
# Of a gzip stream. Each copies what came behind it.
MAX_MEMBERS = 8192
# Below this a client that accepts codings by habit gains nothing.
MIN_HABIT_BYTES = 1024

_NO_QUALITY = re.compile(r"q=0(?:\.0{0,3})?", re.ASCII)


def coding_of_body(value: str | None) -> Coding | None:
    """Reads a request's Content-Encoding.

    Raises:
        UnknownFormat: Anything but gzip, deflate and identity, or several of them.
    """
    encoding = (value or "").strip().lower()
    if encoding == "x-gzip":
        # An older name of it (RFC 9110, section 8.4.1.3).
        encoding = "gzip"
    coding = next((one for one in _WBITS if one == encoding), None)
    if coding is None and encoding not in NO_CODING:
        raise UnknownFormat(f"Content-Encoding: {encoding[:64]!r} is not offered; {' and '.join(_WBITS)} are")
    return coding


def coding_of_answer(accept: str | None, *, is_text: bool, nbytes: int) -> Coding | None:
    """Chooses the coding of an answer of `nbytes`; `is_text` for one that is JSON alone.

    A client that accepts exactly one coding chose it. A list of them is what HTTP libraries send with every request: honouring
    it for tensors would compress each of them for nobody's good.
    """
    accepted: list[str] = []
    for part in (accept or "").split(","):
        coding, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if coding and coding != "identity" and not any(_NO_QUALITY.fullmatch(one) for one in parameters):
            accepted.append(coding)
    is_choice = len(accepted) == 1
    if not is_choice and not (is_text and nbytes >= MIN_HABIT_BYTES):
        return None
    if "gzip" in accepted:
        return "gzip"
    return "deflate" if "deflate" in accepted else None


async def inflate(source: Lease, leases: Leases, coding: Coding, max_bytes: int, pad_bytes: int) -> Lease:
    """Inflates a body into a slot of its own, behind `pad_bytes` free ones; the compressed one goes back.

    Raises:
        BodyTooLarge: It inflates past `max_bytes`.
        TooBusy: There was no room within the time-out.
        InvalidRequest: Not one whole stream of that coding.
    """
    target = await leases.wait(pad_bytes + min(max(4 * source.nbytes, STEP_BYTES), max_bytes))
    inflater = zlib.decompressobj(_WBITS[coding])
    end, fed, tail, num_members = pad_bytes, 0, b"", 1
    while not inflater.eof:
        if not tail:
            tail = bytes(source.view[fed : fed + FED_BYTES])
            fed += len(tail)
        # A little may have inflated to much: all but the first step counts as long.
        nbytes = len(tail) if end == pad_bytes else STEP_BYTES
        try:
            piece = await offload(nbytes, inflater.decompress, tail, STEP_BYTES)
        except zlib.error:
            raise InvalidRequest(f"body: not a {coding} stream") from None
        if not piece and not inflater.unconsumed_tail and fed >= source.nbytes and not inflater.eof:
            raise InvalidRequest(f"body: the {coding} stream is cut off")
        tail = inflater.unconsumed_tail
        if coding == "gzip" and _is_followed(inflater, has_more=fed < source.nbytes):
            num_members += 1
            if num_members > MAX_MEMBERS:
                raise InvalidRequest(f"body: the gzip stream has more than {MAX_MEMBERS} members")
            tail, inflater = inflater.unused_data, zlib.decompressobj(_WBITS[coding])
        begin, end = end, end + len(piece)
        if end - pad_bytes > max_bytes:
            raise BodyTooLarge(f"body: it inflates to more than {max_bytes} bytes")
        target = await append(target, leases, piece, begin, pad_bytes + max_bytes)
    if inflater.unused_data or fed < source.nbytes:
        raise InvalidRequest(f"body: bytes follow the end of the {coding} stream")
    leases.give_back(source)
    target.shrink(end)
    return target


def _is_followed(inflater: zlib._Decompress, *, has_more: bool) -> bool:
    """Whether another member of a gzip stream follows (RFC 1952, section 2.2), as of files that were put together."""
    return inflater.eof and (has_more or bool(inflater.unused_data))


def deflate(chunks: Sequence[bytes | memoryview], coding: Coding) -> bytes:
    """Compresses an answer."""
    deflater = zlib.compressobj(LEVEL, zlib.DEFLATED, _WBITS[coding])
    return b"".join([*(deflater.compress(chunk) for chunk in chunks), deflater.flush()])
