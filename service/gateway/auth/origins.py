"""Lets web pages of other origins call the service (CORS). Owns the headers and the preflight's answer.

Off without `--allow-origin`. Keys travel in headers, never in cookies, so no credentials are allowed.

Source: the Fetch standard, section "HTTP extensions".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilewire.service.gateway.request.head import REQUEST_ID

ANY = "*"
METHODS = "GET, HEAD, POST, PUT, DELETE"
REQUEST_HEADERS = (
    "Accept, Authorization, Content-Encoding, Content-Type, If-Match, If-None-Match, Inference-Header-Content-Length, "
    f"Traceparent, Tracestate, X-API-Key, {REQUEST_ID.title()}, X-Tilewire-Key, X-Timeout-Ms"
)
ANSWER_HEADERS = (
    f"ETag, {REQUEST_ID.title()}, Server-Timing, X-Batch-Size, Retry-After, Inference-Header-Content-Length, "
    "X-Tensor-Name, X-Tensor-Dtype, X-Tensor-Shape, X-Tensor-Bytes, X-Tensor-Hits, X-Tensor-Created, X-Tensor-Last-Used"
)
# How long a browser may remember a preflight; Chromium's own limit is two hours.
MAX_AGE_S = 7200

Headers = tuple[tuple[str, str], ...]


class Origins:
    """Origins whose pages may call, as browsers send them; `*` is all."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)
        self._is_open = ANY in self._allowed
        # Without it, a cache could give one origin's answer to another.
        self._vary: Headers = () if self._is_open else (("vary", "origin"),)

    def headers_for(self, headers: Mapping[str, str]) -> Headers:
        """Returns the headers that the answer to a request with these headers gets besides its own."""
        allowed = self._allow(headers)
        return self._vary if allowed is None else (*allowed, ("access-control-expose-headers", ANSWER_HEADERS))

    def lines_for(self, headers: Mapping[str, str]) -> str:
        """As `headers_for`, as header lines."""
        return "".join(f"{name}: {value}\r\n" for name, value in self.headers_for(headers))

    def preflight(self, method: str, headers: Mapping[str, str]) -> Headers | None:
        """Returns the headers that answer a preflight; None for a request that is none, or whose origin is not allowed."""
        if method != "OPTIONS" or "access-control-request-method" not in headers:
            return None
        allowed = self._allow(headers)
        if allowed is None:
            return None
        return (
            *allowed,
            ("access-control-allow-methods", METHODS),
            ("access-control-allow-headers", REQUEST_HEADERS),
            ("access-control-max-age", str(MAX_AGE_S)),
        )

    def _allow(self, headers: Mapping[str, str]) -> Headers | None:
        origin = headers.get("origin")
        if origin is None or not (self._is_open or origin in self._allowed):
            return None
        return (("access-control-allow-origin", ANY if self._is_open else origin), *self._vary)
