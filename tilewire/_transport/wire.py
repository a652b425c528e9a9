"""One request and one reply as Tilewire's HTTP contract has them. Sends nothing; holds no rule of NumPy's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from numbers import Real
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np

from tilewire._arrays.host import CONTENT_TYPE, HostArray, from_safetensors
from tilewire._errors import ConnectionFailed, ServerError, class_for
from tilewire._names import tensor_name
from tilewire._types import TensorInfo

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 120.0
POLL_S = 0.1
# Shortest time that a look at a server has to be answered: a busy one may take a moment.
LOOK_S = 1.0
# httpx's network layer cuts what was sent off the front of a chunk, copying the rest: quadratic for large chunks.
CHUNK_BYTES = 2**18
# Names a resident that the request needs: proxies hash it, so that requests go where the tensor is warm.
KEY_HEADER = "X-Tilewire-Key"
# What to do, by the name that OpenSSL has for what went wrong.
_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": "for an authority of your own set SSL_CERT_FILE to the file of its certificate",
    "WRONG_VERSION_NUMBER": "is it a server of http:// rather than https://?",
    # The same since OpenSSL 3.2.
    "RECORD_LAYER_FAILURE": "is it a server of http:// rather than https://?",
}
# What names a header, by RFC 9110, section 5.6.2.
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PATH = re.compile("[!-~]*")
_TIMING = re.compile(r"\s*([\w-]+)\s*;(?:[^,]*;)?\s*dur=(\d+(?:\.\d*)?)(?![\w.])")

Progress = Callable[[int, int], None]
# Returns writable memory for a body of so many bytes.
MakeBuffer = Callable[[int], memoryview]


@dataclass(frozen=True, slots=True)
class Call:
    """One request to be.

    Attributes:
        method: HTTP method.
        path: Quoted path.
        query: Query parameters.
        headers: Headers besides the client's own.
        parts: Body, in parts that are sent one after another, each in C order.
        timeout_ms: Milliseconds that the server and the retries have; None for no limit.
        make_buffer: Memory for the answer's body; a fresh array where it is None.
        progress: Called with bytes done and bytes in all, both ways; None for a call without.
        max_silence_s: Seconds without progress after which it fails, however many the client allows; None for the client's.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[bytes | memoryview, ...] = ()
    timeout_ms: float | None = None
    make_buffer: MakeBuffer | None = None
    progress: Progress | None = None
    max_silence_s: float | None = None

    def bounded(self, timeout_s: float | None) -> float | None:
        """Returns the seconds without progress that it may take, of a client that allows `timeout_s`."""
        limits = [limit for limit in (timeout_s, self.max_silence_s) if limit is not None and limit < math.inf]
        return min(limits, default=None)

    @property
    def target(self) -> str:
        """Path and query, as they stand in the request line."""
        return f"{self.path}?{urlencode(self.query, safe='@/')}" if self.query else self.path

    @property
    def is_conditional_change(self) -> bool:
        """Whether it changes something only if a tensor has a version, which the change itself ends."""
        return "If-Match" in self.headers and (self.method in ("PUT", "DELETE") or "store" in self.query)

    @property
    def counts_each_time(self) -> bool:
        """Whether a second time gives another result: it keeps its result in the place of an operand, as `x = x + 1`."""
        operands = [value for name, value in self.query.items() if name != "store"]
        is_guarded = self.headers.get("If-Match", "*") != "*"
        return self.query.get("store") in operands and not is_guarded

    @property
    def num_body_bytes(self) -> int:
        """Bytes of the body."""
        return sum(memoryview(part).nbytes for part in self.parts)

    @property
    def is_small(self) -> bool:
        """Whether the body is sent in one piece: each piece is a write of its own, and the server reads as often."""
        return self.num_body_bytes <= CHUNK_BYTES

    def whole(self) -> bytes:
        """The body in one piece."""
        return b"".join(self.parts)

    def chunks(self) -> Iterator[Any]:
        """The body in pieces that httpx likes: views, not copies."""
        total, sent = self.num_body_bytes, 0
        for view in [memoryview(part) for part in self.parts]:
            for start in range(0, view.nbytes, CHUNK_BYTES):
                piece = view[start : start + CHUNK_BYTES]
                yield piece
                sent += piece.nbytes
                if self.progress is not None:
                    self.progress(sent, total)


class Headers(Protocol):
    """Headers of an answer, by name in any case."""

    def get(self, name: str, /) -> str | None:
        """Returns a header, or None without it."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer as it came.

    Attributes:
        status: HTTP status.
        headers: Headers; names in any case.
        body: All of it, decoded.
    """

    status: int
    headers: Headers
    body: memoryview


class Transport(Protocol):
    """Sends one request and receives its answer; retries nothing."""

    def exchange(self, call: Call) -> Reply:
        """Sends a request and waits for the whole answer.

        Raises:
            ConnectionFailed: No answer.
        """
        ...

    def close(self) -> None:
        """Closes the connections."""
        ...


class AsyncTransport(Protocol):
    """Sends one request and receives its answer; retries nothing."""

    async def exchange(self, call: Call) -> Reply:
        """Sends a request and waits for the whole answer.

        Raises:
            ConnectionFailed: No answer.
        """
        ...

    async def aclose(self) -> None:
        """Closes the connections."""
        ...


def checked_url(url: str) -> str:
    """Returns an address without the slash at its end.

    Raises:
        TypeError: No text.
        ValueError: Not `http://…` or `https://…`, or more than scheme, host, port and path; the message says what to type.
    """
    if not isinstance(url, str):
        raise TypeError(f"base_url: expected an address as 'http://127.0.0.1:8000', got {url!r}")
    url = url.strip()
    if "@" in re.split("[/?#]", url.rpartition("://")[2], maxsplit=1)[0]:
        # Not repeated: logs keep messages.
        raise ValueError('base_url: holds a name or a password; give them as headers={"Authorization": "Basic …"}')
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme, parts.hostname
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is no address: {error}") from error
    if scheme not in ("http", "https"):
        raise ValueError(f"{url!r} is no address of a server; type 'http://{url.rpartition('://')[2]}'")
    if not host:
        raise ValueError(f"{url!r} names no host; type 'http://127.0.0.1:8000'")
    if "?" in url or "#" in url:
        raise ValueError(f"{url!r} has a query or a fragment; type {re.split('[?#]', url, maxsplit=1)[0]!r}")
    if _PATH.fullmatch(parts.path) is None:
        raise ValueError(f"{url!r} has a path that HTTP cannot carry; type {quote(url, safe='%:/[]')!r}")
    return url.rstrip("/")


def check_retries(max_retries: object) -> None:
    """Checks a number of retries.

    Raises:
        TypeError: No number.
        ValueError: Below 0.
    """
    if not isinstance(max_retries, Real):
        raise TypeError(f"max_retries: expected a number; got {max_retries!r}")
    if not float(max_retries) >= 0:
        raise ValueError(f"max_retries: expected 0 or more; got {max_retries!r}")


def check_timeout(timeout: object) -> None:
    """Checks a number of seconds; None and httpx's own object are taken as they are.

    Raises:
        TypeError: A text.
        ValueError: Not positive, or infinite.
    """
    if isinstance(timeout, str):
        raise TypeError(f"timeout: expected seconds, or None for no limit; got {timeout!r}")
    if isinstance(timeout, int | float) and not 0 < timeout < math.inf:
        raise ValueError(f"timeout: expected more than 0 s, or None for no limit; got {timeout!r}")


def proxy_of(url: str) -> str | None:
    """Returns host and port of the proxy that the environment names for an address, or None without one."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    # Without its name and password: logs keep messages.
    return proxy.rpartition("://")[2].rpartition("@")[2].rstrip("/")


def client_headers(api_key: str | None, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the headers that every request of a client carries; the user's win.

    Raises:
        TypeError: The key is no text, or the headers are no texts by name.
        ValueError: A text that no header can have.
    """
    # Compressing tensors costs more than the network saves.
    own = {"Accept-Encoding": "identity"}
    if api_key is not None:
        if not isinstance(api_key, str):
            raise TypeError(f"api_key: expected a text, got {type(api_key).__name__}")
        check_header("api_key", api_key)
        own["Authorization"] = f"Bearer {api_key}"
    given = {} if headers is None else headers
    if not isinstance(given, Mapping) or not all(isinstance(one, str) for pair in given.items() for one in pair):
        # Not repeated: logs keep messages.
        raise TypeError("headers: expected texts by name, as {'X-Team': 'search'}")
    own |= given
    for name, value in own.items():
        if _TOKEN.fullmatch(name) is None:
            raise ValueError(f"headers: {name[:64]!r} cannot name a header")
        check_header(name, value)
    return own


def check_header(argument: str, value: str) -> None:
    """Checks that a header can have a value, which is not repeated: logs keep messages.

    Raises:
        ValueError: It cannot.
    """
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"{argument}: a header has one line of printable ASCII letters")


def unreachable(base_url: object, error: Exception) -> str:
    """Returns the words of a `ConnectionFailed`."""
    return f"{base_url}: {str(error) or type(error).__name__}"


def failed(
    base_url: object, error: Exception, *, was_broken: bool, was_refused: bool | None = None
) -> ConnectionFailed:
    """Makes the error of a connection that gave no answer.

    Args:
        base_url: Address of the server, and of a proxy before it.
        error: Exception of the transport.
        was_broken: Whether it was refused or reset, which a restarting server does.
        was_refused: Whether no connection came about; None where the class of the error says it.
    """
    is_nobody_there = isinstance(error, ConnectionRefusedError)
    was_refused = is_nobody_there if was_refused is None else was_refused
    detail = unreachable(base_url, error)
    signs = (hint for sign, hint in _HINTS.items() if sign in detail)
    hint = "is a server running there?" if is_nobody_there else next(signs, "")
    detail += f"; {hint}" if hint else ""
    return ConnectionFailed(detail, was_broken=was_broken, was_refused=was_refused)


def checked(reply: Reply) -> Reply:
    """Returns the reply if it is a success.

    Raises:
        TilewireError: The class of its status, with the server's words.
        ServerError: A redirect, which names the address to give.
    """
    if reply.status < 300:
        return reply
    if reply.status < 400:
        place = reply.headers.get("location")
        where = f"redirects to {place}; give the address of that server" if place else f"answers {reply.status}"
        raise ServerError(f"the server {where}", status=reply.status)
    raise class_for(reply.status)(
        _detail_of(reply),
        status=reply.status,
        request_id=reply.headers.get("x-request-id"),
        retry_after_s=retry_after_s(reply),
    )


def _detail_of(reply: Reply) -> str:
    """Returns the cause in the server's words; a page of a proxy has none but its status."""
    document = json_of(reply)
    detail = document.get("detail") or document.get("error") if isinstance(document, dict) else None
    text = bytes(reply.body[:200]).decode(errors="replace").strip()
    if not detail and (content_type(reply.headers) == "text/html" or text.startswith("<")):
        phrase = {int(known): known.phrase for known in HTTPStatus}.get(reply.status, "")
        status = f"status {reply.status}: {phrase}".removesuffix(": ")
        return f"{status}, with a web page, so by a proxy or another server; check the address, HTTP_PROXY and NO_PROXY"
    return str(detail or text or f"status {reply.status}")


def content_type(headers: Headers) -> str:
    """Returns the content type of an answer without its parameters; empty without one."""
    return (headers.get("content-type") or "").partition(";")[0].strip().lower()


def unexpected(reply: Reply, expected: str) -> ServerError:
    """Makes the error of a success that is none of Tilewire's, as a login page.

    Args:
        reply: The answer.
        expected: Description of a right reply.
    """
    got = content_type(reply.headers) or "no content type"
    detail = f"expected {expected}, got status {reply.status} and {got}; is this the address of a Tilewire server?"
    return ServerError(detail, status=reply.status)


def memory_for(call: Call, status: int, headers: Headers, num_bytes: int) -> memoryview:
    """Returns memory for an answer's body: the caller's own for a success of the type that it asked for, fresh else.

    Raises:
        ServerError: The answer is said to be larger than this process can hold.
    """
    is_asked_for = status < 300 and content_type(headers) == call.headers.get("Accept")
    if is_asked_for and call.make_buffer is not None:
        return call.make_buffer(num_bytes)
    try:
        # Unlike a bytearray's, its pages are touched once: by what is received.
        return memoryview(np.empty(num_bytes, np.uint8))  # type: ignore[arg-type]
    except (MemoryError, ValueError) as error:
        raise ServerError(f"an answer of {num_bytes} bytes does not fit into memory", status=status) from error


def retry_after_s(reply: Reply) -> float | None:
    """Returns the seconds of `Retry-After`, or None without it."""
    value = reply.headers.get("retry-after") or ""
    return float(value) if value.isdecimal() else None


def parse_timings(server_timing: str) -> dict[str, float]:
    """Returns milliseconds by stage from a `Server-Timing` header."""
    return {name: float(ms) for name, ms in _TIMING.findall(server_timing)}


def parse_arrays(reply: Reply) -> dict[str, HostArray]:
    """Returns the tensors of a reply by name.

    Raises:
        ServerError: The reply is not safetensors.
    """
    try:
        return from_safetensors(reply.body)
    except ValueError as error:
        if content_type(reply.headers) != CONTENT_TYPE:
            raise unexpected(reply, "safetensors") from error
        raise ServerError(f"the answer: {error}", status=reply.status) from error


def parse_list(reply: Reply) -> list[Any]:
    """Returns the entries of a JSON list.

    Raises:
        TilewireError: The answer is an error, or no JSON list.
    """
    return _document(reply, list, "a JSON list")


def parse_object(reply: Reply) -> dict[str, Any]:
    """Returns the fields of a JSON object.

    Raises:
        TilewireError: The answer is an error, or no JSON object.
    """
    return _document(reply, dict, "a JSON object")


def _document(reply: Reply, kind: type[T], expected: str) -> T:
    document = json_of(checked(reply))
    if not isinstance(document, kind):
        raise unexpected(reply, expected)
    return document


def check_gone(reply: Reply) -> None:
    """Checks the answer to a removal.

    Raises:
        TilewireError: It is an error, or not 204.
    """
    if checked(reply).status != HTTPStatus.NO_CONTENT:
        raise unexpected(reply, "status 204")


def parse_head(reply: Reply, name: str) -> TensorInfo | None:
    """Returns the tensor that `X-Tensor-*` headers describe, or None for a 404.

    Raises:
        TilewireError: The answer is an error, or lacks these headers.
    """
    if reply.status == 404:
        return None
    headers = checked(reply).headers
    if not headers.get("x-tensor-dtype"):
        raise unexpected(reply, "X-Tensor headers")
    shape = [int(dim) for dim in re.findall(r"\d+", headers.get("x-tensor-shape") or "")]
    fields = {key: headers.get(f"x-tensor-{key.replace('_', '-')}") for key in ("created", "last_used")}
    texts = {key: headers.get(f"x-tensor-{key}") or "0" for key in ("bytes", "hits")}
    numbers = {key: int(text) if text.isdecimal() else text for key, text in texts.items()}
    dtype, tag = headers.get("x-tensor-dtype") or "", (headers.get("etag") or "").strip('"')
    version = int(tag) if tag.isdecimal() else None
    document = {"name": tensor_name(name), "shape": shape, "dtype": dtype, "version": version}
    return parse_info({**document, **fields, **numbers})


def parse_info(document: Any) -> TensorInfo:
    """Returns one resident tensor from the server's JSON.

    Raises:
        ServerError: It is not such a description.
    """
    try:
        info = TensorInfo(
            name=document["name"],
            shape=tuple(document["shape"]),
            dtype=document["dtype"],
            nbytes=document["bytes"],
            created=document.get("created"),
            last_used=document.get("last_used"),
            hits=document.get("hits"),
            placement=document.get("placement"),
            engines=None if document.get("engines") is None else tuple(document["engines"]),
            axis=document.get("axis"),
            version=document.get("version"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _no_description(document) from error
    texts, numbers = (info.name, info.dtype), (*info.shape, info.nbytes, info.hits or 0, info.version or 0)
    if not all(isinstance(one, str) for one in texts) or not all(isinstance(one, int) for one in numbers):
        raise _no_description(document)
    return info


def _no_description(document: Any) -> ServerError:
    return ServerError(f"not the description of a tensor: {str(document)[:200]}")


def json_of(reply: Reply) -> object:
    """Returns the JSON of a reply, or None where it is none."""
    try:
        document: object = json.loads(bytes(reply.body))
    except (ValueError, RecursionError):
        return None
    return document


def body_headers(parts: tuple[bytes | memoryview, ...], content_type: str = CONTENT_TYPE) -> dict[str, str]:
    """Returns the headers that describe a body; its length is there even where it is empty."""
    length = sum(memoryview(part).nbytes for part in parts)
    return {"Content-Length": str(length), **({"Content-Type": content_type} if parts else {})}
