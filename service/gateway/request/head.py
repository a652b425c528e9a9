"""Reads request lines and headers. Owns which are read, which are each request's own, and which heads count as the same.

Heads are the same where their request lines and the headers that anything here reads are. What nobody reads, and what is each
request's own, its id and its place in a trace, is left out before heads are compared, and of headers that are cached.
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
# Headers that name the caller: two of them could be read in two ways.
IDENTITIES = ("authorization", "x-api-key")
# Headers that change how the body travels.
_FRAMING = frozenset({"expect", "transfer-encoding", "content-encoding"})
# All headers that this server or a parser of it reads besides: `Head` has no others.
READ_HEADERS = _FRAMING.union(
    IDENTITIES,
    ("accept", "accept-encoding", "content-length", "content-type", "if-match", "if-none-match", "x-timeout-ms"),
    ("access-control-request-headers", "access-control-request-method", "host", "inference-header-content-length"),
    ("connection", "http2-settings", "keep-alive", "origin", "proxy-connection", "te", "trailer", "upgrade"),
)

# Longest head that is looked up, in bytes: each entry of the cache holds one.
MAX_CACHED_BYTES = 2**12

# No part of a value where it stands around one (RFC 9110, section 5.5).
_SPACE = " \t"
_NOTHING: Mapping[str, str] = MappingProxyType({})
_END = b"\r\n\r\n"
_READ, _OWN = ({name.encode("ascii"): name for name in names} for names in (READ_HEADERS, OWN_HEADERS))
# Of several lines with one of these names, each has a part of one list (RFC 9110, section 5.3).
_LISTS = frozenset({"accept", "accept-encoding", "if-none-match"})
# A line that nobody reads, and no parser takes for anything else (RFC 9110, section 5).
_UNREAD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
# Values of `Connection` in a head that is cached; the last two come with an offer of HTTP/2, which is declined.
_STAYING = frozenset({"keep-alive", "upgrade", "http2-settings"})
_WORD = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)


class Head(msgspec.Struct, frozen=True):
    """Request line and headers: those of `READ_HEADERS`.

    Attributes:
        method: Upper case.
        path: Unquoted.
        query: Query string as sent.
        headers: Values by lower-case name; the last one of repeated headers, but all of lists.
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
        text: Request line and the headers that are read, without those that are each request's own.
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

    Other headers than those of `READ_HEADERS` and `OWN_HEADERS` are dropped.

    Returns:
        The head, and the request's own values by name.
    """
    headers: dict[str, str] = {}
    own: dict[str, str] = {}
    repeated: set[str] = set()
    for raw_name, raw_value in raw_headers:
        name = _READ.get(raw_name)
        if name is None:
            if raw_name in _OWN:
                own[_OWN[raw_name]] = raw_value.decode("latin-1").strip(_SPACE)
            continue
        value = raw_value.decode("latin-1").strip(_SPACE)
        if name in headers:
            repeated.add(name)
            value = f"{headers[name]}, {value}" if name in _LISTS else value
        headers[name] = value
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
    """Takes out of the head that `data` begins with what makes it another than those before.

    Returns:
        None when no whole head of a POST stands there. None, too, when an own header comes twice, or when a parser could
        find another end of a line that is left out.
    """
    if not data.startswith(b"POST "):
        return None
    end = data.find(_END, 0, MAX_CACHED_BYTES)
    if end < 0:
        return None
    lines = data[:end].split(b"\r\n")
    kept, own = [lines[0]], _NOTHING
    for line in lines[1:]:
        name = line[: line.find(b":")].lower()
        if name in _READ:
            kept.append(line)
        elif _UNREAD.fullmatch(line) is None:
            return None
        elif name in _OWN:
            value, name_text = line[len(name) + 1 :], _OWN[name]
            if name_text in own or not value.isascii() or b"\t" in value:
                return None
            own = {**own, name_text: value.decode("ascii").strip(" ")}
    return HeadKey(b"\r\n".join(kept), end + len(_END), own)


def has_plain_lines(text: bytes) -> bool:
    """Whether every line of a head ends with CR and LF, so that all parsers find the same lines."""
    ends = text.count(b"\r\n")
    return text.count(b"\n") == ends == text.count(b"\r")


def own_values_in(raw_headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """A request's own values by name, of headers that belong to no head, as far as they were parsed."""
    return {_OWN[name]: value.decode("latin-1").strip(_SPACE) for name, value in raw_headers if name in _OWN}


def request_id_of(own: Mapping[str, str]) -> str | None:
    """The client's request id, if it could not start another header or another line of a log."""
    given = own.get(REQUEST_ID)
    return given if given is not None and _WORD.fullmatch(given) else None
