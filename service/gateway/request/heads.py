"""Heads of requests that are the same, byte for byte, but for what each request calls its own: its id and its place in a trace.

Owns what counts as the same head, and reads the values that may differ. Takes bytes only where no parser could find another end
of a line or of the head in them. Knows no connection and no route. Runs in the gateway's event loop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Connections are many, and idle ones hold what they remember.
MAX_HEAD_BYTES = 2**12

_END = b"\r\n\r\n"
_POST = b"POST "
_NOTHING: Mapping[str, str] = MappingProxyType({})
# Headers whose values are the request's own.
_OWN = re.compile(rb"\r\n(x-request-id|traceparent|tracestate):([^\r\n]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Form:
    """What heads have in common that differ in own values of the same lengths.

    Attributes:
        nbytes: Of such a head.
        pieces: What is the same: where, and the bytes.
        blanks: Own values: the header's name in lower case, and where its value begins and ends, with the space around it.
    """

    nbytes: int
    pieces: tuple[tuple[int, bytes], ...]
    blanks: tuple[tuple[str, int, int], ...] = ()

    def own(self, data: bytes) -> Mapping[str, str] | None:
        """Own values by their headers' names, of a request that begins with such a head; None when it does not."""
        for begin, piece in self.pieces:
            if not data.startswith(piece, begin):
                return None
        return _read(data, self.blanks) if self.blanks else _NOTHING


def form_of(chunk: bytes) -> Form | None:
    """The form of the head that `chunk` begins with, or None when it is not one that can be remembered."""
    head = _head_of(chunk)
    pieces, blanks, begin = [], [], 0
    for found in _OWN.finditer(head):
        pieces.append((begin, head[begin : found.start(2)]))
        begin = found.end(2)
        blanks.append((found[1].decode("ascii").lower(), found.start(2), begin))
    is_twice = len({name for name, _, _ in blanks}) < len(blanks)
    return Form(len(head), (*pieces, (begin, head[begin:])), tuple(blanks)) if head and not is_twice else None


def _head_of(chunk: bytes) -> bytes:
    if not chunk.startswith(_POST):
        return b""
    end = chunk.find(_END, 0, MAX_HEAD_BYTES)
    head = chunk[: end + len(_END)] if end > 0 else b""
    # A parser may take another end of line for one: then its head would end elsewhere.
    breaks = head.count(b"\r\n")
    return head if head.count(b"\n") == breaks == head.count(b"\r") else b""


def _read(data: bytes, blanks: tuple[tuple[str, int, int], ...]) -> dict[str, str] | None:
    own = {}
    for name, begin, end in blanks:
        value = data[begin:end]
        # An end of a line in it would begin a header that nobody has looked at.
        if not value.isascii() or not (text := value.decode("ascii")).isprintable():
            return None
        own[name] = text.strip(" ")
    return own
