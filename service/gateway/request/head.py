"""Reads request lines and headers. Owns which headers are each request's own, and which heads count as the same.

Clients that repeat themselves send the same head each time, but for their request id and their place in a trace. Those are
taken out of a head before it is compared, and out of its headers before they are cached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from tilewire.service.errors import InvalidRequest, UnknownCoding

REQUEST_ID = "x-request-id"
TRACE_PARENT, TRACE_STATE = "traceparent", "tracestate"
OWN_HEADERS = frozenset({REQUEST_ID, TRACE_PARENT, TRACE_STATE})

# Longest head that is looked up, in bytes: each entry of the cache holds one.
MAX_CACHED_BYTES = 2**12

# Headers that name the caller: two of them could be read in two ways.
IDENTITIES = ("authorization", "x-api-key")
_NOTHING: Mapping[str, str] = MappingProxyType({})
_END = b"\r\n\r\n"
# A head without any of these has no own header, whatever the case of its letters.
_MARKS = re.compile(b"\r\n(?:%b):" % "|".join(sorted(OWN_HEADERS)).encode("ascii"), re.IGNORECASE)
_LINES = tuple((name, b"\r\n%b:" % name.encode("ascii")) for name in sorted(OWN_HEADERS))
# Values of `Connection` in a head that is cached; the last two come with an offer of HTTP/2, which is declined.
_STAYING = frozenset({"keep-alive", "upgrade", "http2-settings"})
# Headers that change how the body travels.
_FRAMING = frozenset({"expect", "transfer-encoding", "content-encoding"})
_WORD = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)


class Head(msgspec.Struct, frozen=True):
    """Request line and headers, without those that are each request's own.

    Attributes:
        method: Upper case.
        path: Unquoted.
        query: Query string as sent.
        headers: Values by lower-case name; the last one of repeated headers.
        repeated: Names of headers that came more than once.
        content_length: Declared length of the body; None when it is not declared.
        is_chunked: The body comes in chunks.
    """

    method: str
    path: str
    query: bytes
    headers: Mapping[str, str]
    repeated: frozenset[str]
    content_length: int | None
    is_chunked: bool

    def check(self) -> None:
        """Refuses what could be read in two ways.

        Raises:
            InvalidRequest: Two keys, or a line break in the path.
            UnknownCoding: A transfer coding besides `chunked`.
        """
        for name in IDENTITIES:
            if name in self.repeated:
                raise InvalidRequest(f"{name.title()}: given twice")
        # A router's patterns end before a last line break: `a%0A` would be another name of `a`.
        if "\n" in self.path:
            raise InvalidRequest(f"path: {self.path[:64]!r} holds a line break")
        coding = self.headers.get("transfer-encoding")
        if coding is not None and (coding.strip().lower() != "chunked" or "transfer-encoding" in self.repeated):
            raise UnknownCoding(f"Transfer-Encoding: {coding[:64]!r} is not offered; chunked is")

    @property
    def is_repeatable(self) -> bool:
        """Whether equal bytes mean an equal request: its body has a declared length, and the connection stays."""
        headers = self.headers
        return (
            self.method == "POST"
            and self.content_length is not None
            and _FRAMING.isdisjoint(headers)
            and all(word.strip() in _STAYING for word in headers.get("connection", "keep-alive").lower().split(","))
        )


class HeadKey(msgspec.Struct, frozen=True, gc=False):
    """Key of a head in the template cache.

    Attributes:
        text: Head without the values that are each request's own.
        nbytes: Length of the whole head, with the empty line.
        own: Own values by lower-case name.
    """

    text: bytes
    nbytes: int
    own: Mapping[str, str]


def read_head(
    method: str, path: str, query: bytes, raw_headers: Iterable[tuple[bytes, bytes]]
) -> tuple[Head, Mapping[str, str]]:
    """Reads parsed headers, with names in lower case, and the parts of a request line; the path is unquoted.

    Returns:
        The head, and the request's own values by name.
    """
    headers: dict[str, str] = {}
    repeated: set[str] = set()
    for raw_name, raw_value in raw_headers:
        name = raw_name.decode("latin-1")
        if name in headers:
            repeated.add(name)
        headers[name] = raw_value.decode("latin-1")
    own = {name: headers.pop(name) for name in OWN_HEADERS if name in headers}
    length = headers.get("content-length")
    coding = headers.get("transfer-encoding", "")
    head = Head(
        method,
        path,
        query,
        headers,
        frozenset(repeated),
        int(length) if length is not None else None,
        "chunked" in coding.lower(),
    )
    return head, own


def key_of(data: bytes) -> HeadKey | None:
    """Takes the own values out of the head that `data` begins with.

    Returns:
        None when no whole head of a POST stands there. None, too, when a parser could find another end of a line or of
        the head.
    """
    if not data.startswith(b"POST "):
        return None
    end = data.find(_END, 0, MAX_CACHED_BYTES)
    if end < 0:
        return None
    nbytes = end + len(_END)
    text = data[:nbytes]
    if _MARKS.search(text) is None:
        return HeadKey(text, nbytes, _NOTHING)
    lower = text.lower()
    spans: list[tuple[int, int, str]] = []
    for name, line in _LINES:
        at = lower.find(line)
        if at >= 0:
            begin = at + len(line)
            if lower.find(line, begin) >= 0:
                return None
            spans.append((begin, lower.find(b"\r\n", begin), name))
    own: dict[str, str] = {}
    pieces, reached = [], 0
    for begin, stop, name in sorted(spans):
        value = text[begin:stop]
        # An end of a line in it would begin a header that nobody has looked at.
        if not value.isascii() or not (word := value.decode("ascii")).isprintable():
            return None
        own[name] = word.strip(" ")
        pieces.append(text[reached:begin])
        reached = stop
    return HeadKey(b"".join((*pieces, text[reached:])), nbytes, own)


def has_plain_lines(text: bytes) -> bool:
    """Whether every line of a head ends with CR and LF, so that all parsers find the same lines."""
    ends = text.count(b"\r\n")
    return text.count(b"\n") == ends == text.count(b"\r")


def request_id_of(own: Mapping[str, str]) -> str | None:
    """The client's request id, if it could not start another header or another line of a log."""
    given = own.get(REQUEST_ID)
    return given if given is not None and _WORD.fullmatch(given) else None
