"""Inflates compressed messages within a bound: the library would inflate them first and measure them then.

The library hands messages over as they came, so a compressed one is found by its first bytes. In our messages no field
begins with those of gzip, and no message with those of zlib.
"""

from __future__ import annotations

import zlib

from tilewire.service.errors import BodyTooLarge, InvalidRequest

_GZIP, _ZLIB = b"\x1f\x8b", 0x78
_FIRST = (b"\x1f", b"\x78")
# The first two bytes of zlib, read as a number, are a multiple of this.
_ZLIB_CHECK = 31
# Takes both formats.
_WINDOW_BITS = 47


def is_compressed(message: bytes) -> bool:
    """Whether a message begins as gzip or zlib do."""
    if message[:1] not in _FIRST:
        return False
    head = message[:2]
    return head == _GZIP or (head[0] == _ZLIB and len(head) > 1 and not int.from_bytes(head, "big") % _ZLIB_CHECK)


def inflate(message: bytes, max_bytes: int) -> bytes:
    """Returns a message as it was before it was compressed.

    Raises:
        InvalidRequest: It is not what its first bytes say.
        BodyTooLarge: It inflates to more than `max_bytes`.
    """
    decoder = zlib.decompressobj(_WINDOW_BITS)
    try:
        inflated = decoder.decompress(message, max_bytes + 1)
    except zlib.error:
        raise InvalidRequest("request: its compression is broken") from None
    if len(inflated) > max_bytes:
        raise BodyTooLarge(f"request: inflates to more than the limit of {max_bytes} bytes")
    if not decoder.eof:
        raise InvalidRequest("request: its compression is broken off")
    return inflated
