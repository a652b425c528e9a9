"""Calls to requests, replies to results: all that both clients share. Knows Tilewire's HTTP contract; sends nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from tilewire._arrays import CONTENT_TYPE, Array, from_safetensors, to_safetensors
from tilewire._errors import ServerError, class_for
from tilewire._types import Answer, Operand, TensorInfo

# httpx's network layer cuts what was sent off the front of a chunk, copying the rest: quadratic for large chunks.
_CHUNK_BYTES = 2**18
# Arrays among the options of matmul's method: inputs to the server.
_OPTIONAL_OPERANDS = ("bias", "a_scale", "b_scale")
_RETRIED_STATUSES = (429, 503)
_MAX_WAIT_S = 30.0
_MAX_URLS = 256
_NAME = re.compile(r"@?((?:[A-Za-z0-9._-]+/)*[A-Za-z0-9._-]+)", re.ASCII)
_TIMING = re.compile(r"\s*([\w-]+)\s*;(?:[^,]*;)?\s*dur=([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Call:
    """One request to be.

    Attributes:
        method: HTTP method.
        path: Quoted path.
        query: Query parameters.
        headers: Headers besides the client's own.
        parts: The body, in parts that are sent one after another.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[bytes | memoryview, ...] = ()

    def chunks(self) -> Iterator[Any]:
        """The body in pieces that the network layer likes: one, where it is small; else views, not copies."""
        views = [memoryview(part) for part in self.parts]
        if sum(view.nbytes for view in views) <= _CHUNK_BYTES:
            # Each piece is a write of its own, and the server reads as often.
            yield b"".join(views)
            return
        for view in views:
            for start in range(0, view.nbytes, _CHUNK_BYTES):
                yield view[start : start + _CHUNK_BYTES]


class Urls:
    """Whole addresses, worked out once for each path and query: httpx reads an address anew whenever it is put together.

    Args:
        build: Makes one.
    """

    def __init__(self, build: Callable[[Call], Any]) -> None:
        self._build = build
        self._known: dict[tuple[object, ...], Any] = {}

    def __call__(self, call: Call) -> Any:
        """The address of a call."""
        key = (call.path, *call.query.items())
        url = self._known.get(key)
        if url is None:
            if len(self._known) >= _MAX_URLS:
                self._known.clear()
            url = self._known[key] = self._build(call)
        return url


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer as it came.

    Attributes:
        status: HTTP status.
        headers: By lower-case name.
        body: All of it, decoded.
    """

    status: int
    headers: Mapping[str, str]
    body: bytearray


LIST = Call("GET", "/v1/tensors", headers={"Accept": "application/json"})
LIVE = Call("GET", "/v2/health/live")
READY = Call("GET", "/v2/health/ready")


def op_call(op: str, operands: Mapping[str, Operand | None], options: Mapping[str, Any], store: str | None) -> Call:
    """Builds the request of one op.

    Args:
        op: Its name.
        operands: By input name; None for those that are not given.
        options: By name; None leaves one at the server's default. `timeout_ms` and `request_id` may be among them.
        store: Name under which the result stays on the server, or None to get it.

    Raises:
        TypeError: An operand that is no array and no `@name`.
        ValueError: A name that cannot be a tensor's.
    """
    operands = {**operands, **{name: options[name] for name in _OPTIONAL_OPERANDS if name in options}}
    query = {
        name: _text(options[name])
        for name in options.keys() - {"request_id", *_OPTIONAL_OPERANDS}
        if options[name] is not None
    }
    residents = {name: operand for name, operand in operands.items() if isinstance(operand, str)}
    for name, resident in residents.items():
        if not resident.startswith("@"):
            raise TypeError(f"{name}: {resident[:64]!r} is neither an array nor the name of a resident tensor, '@…'")
        query[name] = f"@{tensor_name(resident)}"
    arrays = {
        name: np.asarray(operand) for name, operand in operands.items() if operand is not None and name not in residents
    }
    if store is not None:
        query["store"] = f"@{tensor_name(store)}"
    headers = {"X-Request-Id": options["request_id"]} if options.get("request_id") else {}
    return _with_body(Call("POST", f"/v1/{quote(op, safe='')}", query, headers), arrays)


def put_call(name: str, array: npt.ArrayLike) -> Call:
    """Builds the upload of one resident tensor."""
    return _with_body(tensor_call("PUT", name), {"tensor": np.asarray(array)})


def tensor_call(method: str, name: str) -> Call:
    """Builds a request about one resident tensor."""
    return Call(method, f"/v1/tensors/{quote(tensor_name(name))}", headers={"Accept": CONTENT_TYPE})


def tensor_name(name: str) -> str:
    """The name without its `@`, checked here because HTTP libraries rewrite paths that hold `..`.

    Raises:
        ValueError: A name that no tensor can have.
    """
    match = _NAME.fullmatch(name)
    if match is None or ".." in match[1].split("/") or "." in match[1].split("/"):
        raise ValueError(f"{name[:64]!r} cannot name a tensor; expected A-Z a-z 0-9 . _ - in segments parted by /")
    return match[1]


def checked(reply: Reply) -> Reply:
    """Returns the reply if it is a success.

    Raises:
        TilewireError: The class of its status, with the server's words.
    """
    if reply.status < 400:
        return reply
    document = _json_of(reply)
    detail = document.get("detail") or document.get("error") if isinstance(document, dict) else None
    detail = str(detail or reply.body[:200].decode(errors="replace") or f"status {reply.status}")
    raise class_for(reply.status)(
        detail,
        status=reply.status,
        request_id=reply.headers.get("x-request-id"),
        retry_after_s=_retry_after_s(reply),
    )


def wait_before_retry_s(reply: Reply, attempt: int, max_retries: int) -> float | None:
    """Seconds to wait before sending the same request again, or None to leave it.

    Args:
        reply: What came.
        attempt: How many retries there have been.
        max_retries: How many there may be.
    """
    if reply.status not in _RETRIED_STATUSES or attempt >= max_retries:
        return None
    asked = _retry_after_s(reply)
    return min(_MAX_WAIT_S, 0.25 * 2**attempt if asked is None else asked)


def parse_answer(reply: Reply) -> Answer:
    """Turns a successful reply of an op into its answer."""
    if reply.headers.get("content-type", "").startswith("application/json"):
        result: Array | TensorInfo = parse_info(_json_of(reply))
    else:
        result = parse_array(reply)
    batch_size = reply.headers.get("x-batch-size", "")
    return Answer(
        result=result,
        request_id=reply.headers.get("x-request-id"),
        batch_size=int(batch_size) if batch_size.isdecimal() else None,
        timings_ms=parse_timings(reply.headers.get("server-timing", "")),
    )


def parse_timings(server_timing: str) -> dict[str, float]:
    """Milliseconds by stage from a `Server-Timing` header."""
    return {name: float(ms) for name, ms in _TIMING.findall(server_timing)}


def parse_array(reply: Reply) -> Array:
    """The one tensor of a reply.

    Raises:
        ServerError: The reply is not one safetensors tensor.
    """
    try:
        (array,) = from_safetensors(reply.body).values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"the answer is not one safetensors tensor: {error}", status=reply.status) from error
    return array


def parse_put(reply: Reply, name: str, array: npt.ArrayLike) -> TensorInfo:
    """The stored tensor as the server describes it, or as it was sent where the reply has no description."""
    document = _json_of(reply)
    if isinstance(document, dict) and "shape" in document:
        return parse_info(document)
    sent = np.asarray(array)
    return TensorInfo(tensor_name(name), sent.shape, sent.dtype.name, sent.nbytes)


def parse_list(reply: Reply) -> list[TensorInfo]:
    """The resident tensors of a listing."""
    document = _json_of(reply)
    if not isinstance(document, list):
        raise ServerError("the listing of tensors is not a JSON list", status=reply.status)
    return [parse_info(entry) for entry in document]


def parse_head(reply: Reply, name: str) -> TensorInfo | None:
    """The tensor that `X-Tensor-*` headers describe, or None for a 404."""
    if reply.status == 404:
        return None
    headers = checked(reply).headers
    shape = [int(dim) for dim in re.findall(r"\d+", headers.get("x-tensor-shape", ""))]
    fields = {key: headers.get(f"x-tensor-{key.replace('_', '-')}") for key in ("created", "last_used")}
    numbers = {key: int(headers.get(f"x-tensor-{key}", "0")) for key in ("bytes", "hits")}
    dtype = headers.get("x-tensor-dtype", "")
    return parse_info({"name": tensor_name(name), "shape": shape, "dtype": dtype, **fields, **numbers})


def parse_info(document: Any) -> TensorInfo:
    """One resident tensor from the server's JSON.

    Raises:
        ServerError: It is not such a description.
    """
    try:
        return TensorInfo(
            name=document["name"],
            shape=tuple(document["shape"]),
            dtype=document["dtype"],
            nbytes=document["bytes"],
            created=document.get("created"),
            last_used=document.get("last_used"),
            hits=document.get("hits"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"not the description of a tensor: {str(document)[:200]}") from error


def unreachable(base_url: object, error: Exception) -> str:
    """The words of a ConnectionFailed."""
    return f"{base_url}: {error or type(error).__name__}"


def _with_body(call: Call, arrays: Mapping[str, Array]) -> Call:
    parts = to_safetensors(arrays) if arrays else ()
    length = sum(memoryview(part).nbytes for part in parts)
    headers = {**call.headers, "Accept": CONTENT_TYPE, "Content-Length": str(length)}
    if parts:
        headers["Content-Type"] = CONTENT_TYPE
    return Call(call.method, call.path, call.query, headers, parts)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | np.bool_) else str(value)


def _json_of(reply: Reply) -> object:
    try:
        document: object = json.loads(reply.body)
    except ValueError:
        return None
    return document


def _retry_after_s(reply: Reply) -> float | None:
    value = reply.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None


def client_headers(api_key: str | None, headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers that every request of a client carries; the user's win."""
    # Compressing tensors costs more than the network saves, so it is not asked for.
    own = {"Accept-Encoding": "identity"}
    if api_key is not None:
        own["Authorization"] = f"Bearer {api_key}"
    return {**own, **(headers or {})}
