"""Parses requests with httptools, for a server that takes up no offer of another protocol.

Clients such as Java's own offer HTTP/2 with every request (`Upgrade: h2c`). A server may decline by answering in
HTTP/1.1 (RFC 9110, section 7.8). But httptools takes a request with such an offer to end with its head; here its body
is read, too. Refuses heads that others may read otherwise. Runs in the gateway's event loop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Headers that give the length of a body.
_FRAMING = (b"content-length", b"transfer-encoding")
# A name or an IPv4 address, or an IPv6 address in brackets; a port. Neither user, path nor list (RFC 9110, section 7.2).
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")


class RequestParser:
    """Parser whose listener hears the requests. It must take no note of a message's end that `is_early`.

    `inner` is the parser of httptools that has the request under way.
    """

    def __init__(self, listener: HttpToolsProtocol) -> None:
        self._listener = listener
        self.inner = _parser_for(listener)

    def feed_data(self, data: bytes) -> None:
        """Parses what came.

        Raises:
            httptools.HttpParserError: It is not HTTP.
        """
        while data:
            try:
                self.inner.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.inner.get_method() == b"CONNECT":
                    # The bytes behind it are for the host to which the client would be connected.
                    return
                data = data[offer.args[0] :]
                if self.is_early:
                    self.inner = self._of_rest()
            else:
                return

    @property
    def is_early(self) -> bool:
        """Whether the reported end of a message is only that of its head: it made an offer, and has a body."""
        return self.inner.should_upgrade() and any(
            name in _FRAMING and value.strip(b"0") for name, value in self._listener.headers
        )

    def _of_rest(self) -> httptools.HttpRequestParser:
        """A parser that stands behind the head of the request whose body is still to come."""
        rest = _RestListener(self._listener)
        inner = _parser_for(rest)
        framing = [b"%s: %s\r\n" % (name, value) for name, value in self._listener.headers if name in _FRAMING]
        inner.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n")))
        rest.reports_heads = True
        return inner


class _RestListener:
    """Passes on what is parsed, but for the head that only says how long the rest is."""

    def __init__(self, listener: HttpToolsProtocol) -> None:
        self._listener = listener
        self.on_body = listener.on_body
        self.on_message_complete = listener.on_message_complete
        self.reports_heads = False

    def on_message_begin(self) -> None:
        if self.reports_heads:
            self._listener.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.reports_heads:
            self._listener.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.reports_heads:
            self._listener.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.reports_heads:
            self._listener.on_headers_complete()


def _parser_for(listener: object) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(listener)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def check_head(method: str, version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refuses what the parser lets through and a proxy may read otherwise.

    Raises:
        ValueError: Another version than 1.0 and 1.1. Host is missing, given twice or no authority (RFC 9112, section 3.2).
            The last transfer coding, and no other, is not `chunked`, or the client speaks HTTP/1.0 (section 6.1).
            The target is `*` without OPTIONS (section 3.2.4).
    """
    if version not in ("1.0", "1.1"):
        raise ValueError("the version is neither HTTP/1.1 nor HTTP/1.0")
    num_hosts = 0
    for name, value in headers:
        if name == b"host":
            num_hosts += 1
            if _HOST.fullmatch(value) is None:
                raise ValueError("Host: expected a name or an address, and at most a port behind it")
        elif name == b"transfer-encoding" and (version == "1.0" or not _ends_in_chunks(value)):
            raise ValueError("Transfer-Encoding: expected chunked, last and once, in HTTP/1.1")
    if num_hosts > 1 or (num_hosts == 0 and version != "1.0"):
        raise ValueError(f"Host: expected once, got {num_hosts}")
    if target == b"*" and method != "OPTIONS":
        raise ValueError("the target * is for OPTIONS alone")


def _ends_in_chunks(value: bytes) -> bool:
    """Whether a body of these transfer codings ends where its chunks do; what codings there are beside is refused later."""
    codings = [coding.strip(b" \t").lower() for coding in value.split(b",")]
    return codings[-1] == b"chunked" and codings.count(b"chunked") == 1 and b"" not in codings
