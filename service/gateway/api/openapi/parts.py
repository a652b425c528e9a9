"""Describes what many operations share: bodies, answers, errors by cause, parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewire.service.errors import (
    BeyondLimit,
    BodyTooLarge,
    DeadlinePassed,
    Forbidden,
    InternalError,
    InvalidRequest,
    LengthRequired,
    Lost,
    OverQuota,
    PreconditionFailed,
    ResidentQuota,
    StoreFull,
    TilewireError,
    TooBusy,
    Unauthorized,
    Unavailable,
    UnknownCoding,
    UnknownFormat,
    UnknownName,
)
from tilewire.service.gateway.codecs.negotiation import CODECS
from tilewire.service.gateway.request.head import REQUEST_ID

Causes = tuple[type[TilewireError], ...]
Described = dict[str, Any]

# Any request: its head, its key, a fault of ours, too many connections or the end of the service.
ANYWHERE: Causes = (InvalidRequest, UnknownCoding, InternalError, Unavailable)
KEYS: Causes = (*ANYWHERE, Unauthorized, Forbidden, OverQuota)
# Errors of calls that take part in the queue.
ADMITTED: Causes = (*KEYS, TooBusy, UnknownName)
BODY: Causes = (*ADMITTED, LengthRequired, BodyTooLarge, UnknownFormat, BeyondLimit)
COMPUTED: Causes = (*BODY, Lost, PreconditionFailed, DeadlinePassed)
STORED: Causes = (*COMPUTED, ResidentQuota, StoreFull)

BINARY: Described = {"schema": {"type": "string", "format": "binary"}}
OCTETS = "application/octet-stream"
NAME_PATTERN = "^[A-Za-z0-9._/-]{1,255}$"

# As documents spell it.
REQUEST_ID_HEADER = REQUEST_ID.title()
HEADERS: Described = {
    name: {"description": description, "schema": {"type": kind}}
    for name, kind, description in (
        (REQUEST_ID_HEADER, "string", "Id of the request: the client's, or the server's."),
        ("ETag", "string", "Version of the tensor or program, for `If-Match` and `If-None-Match`."),
        (
            "Server-Timing",
            "string",
            "Milliseconds of `receive`, `queue`, `h2d`, `kernel` and `d2h`, as far as they took any.",
        ),
        ("X-Batch-Size", "integer", "Number of requests that shared the launch."),
        ("Retry-After", "integer", "Seconds to wait before the next attempt."),
    )
}


def ref(name: str) -> Described:
    """Refers to a schema of the components."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_content(schema: Described, example: object = None) -> Described:
    """Describes a body of JSON."""
    described = {"schema": schema} if example is None else {"schema": schema, "example": example}
    return {"application/json": described}


def list_content(name: str) -> Described:
    """Describes a body of JSON that is a list of what a schema describes."""
    return json_content({"type": "array", "items": ref(name)})


def binary_content() -> Described:
    """Describes bodies of tensors in every binary format.

    `application/octet-stream` is the type that generators support.
    """
    types = (OCTETS, *(codec.content_type for codec in CODECS if not codec.is_text))
    return {content_type: dict(BINARY) for content_type in types}


def answer(
    description: str, content: Described | None = None, *, is_computed: bool = False, has_version: bool = False
) -> Described:
    """Describes an answer and its headers."""
    computed, version = ["Server-Timing", "X-Batch-Size"] if is_computed else [], ["ETag"] if has_version else []
    names = [REQUEST_ID_HEADER, *computed, *version]
    described: Described = {"description": description, "headers": _headers(*names)}
    return described if content is None else described | {"content": content}


def not_modified() -> Described:
    """Describes the answer to who has the version already."""
    return {"304": answer("It has one of these versions.", has_version=True)}


def errors(causes: Causes, *, is_oip: bool = False) -> Described:
    """Describes the answers to errors, by status: as RFC 9457 problem details, or in the form of `/v2`."""
    problem = {"application/problem+json": {"schema": ref("Problem")}}
    content = json_content(ref("InferError")) if is_oip else problem
    described: Described = {}
    for status in sorted({cause.status for cause in causes}):
        same = [cause for cause in causes if cause.status == status]
        names = [REQUEST_ID_HEADER, *(["Retry-After"] if any(cause.retryable for cause in same) else [])]
        text = " ".join(f"{(cause.__doc__ or '').splitlines()[0]}" for cause in same)
        described[str(status)] = {"description": text, "headers": _headers(*names), "content": content}
    return described


def body(content: Described, description: str = "", *, is_required: bool = True) -> Described:
    """Describes the body of a request."""
    described: Described = {"content": content, "required": is_required}
    return described | {"description": description} if description else described


def operation(
    answers: Described,
    causes: Causes,
    parameters: Sequence[Described] = (),
    request_body: Described | None = None,
    *,
    is_oip: bool = False,
) -> Described:
    """Describes a call: its answers, and those to the errors that it may be answered with."""
    described: Described = {"parameters": list(parameters)} if parameters else {}
    if request_body is not None:
        described["requestBody"] = request_body
    # First in the document, and instead of an error of the same status.
    return described | {"responses": answers | errors(causes, is_oip=is_oip) | answers}


def describe_json(schema: str, description: str, *, is_open: bool = False, is_oip: bool = False) -> Described:
    """Describes a call without parameters that answers JSON; one that is open needs no key."""
    answers = {"200": answer(description, json_content(ref(schema)))}
    return operation(answers, ANYWHERE if is_open else KEYS, is_oip=is_oip)


def describe_ready(schema: str, parameters: Sequence[Described] = (), *, is_oip: bool = True) -> Described:
    """Describes a call that is answered 503 while nothing is computed, with the reason in the same schema."""
    content = json_content(ref(schema))
    answers = {"200": answer("Requests are computed.", content), "503": answer("Not now, and why.", content)}
    return operation(answers, ADMITTED if parameters else ANYWHERE, parameters, is_oip=is_oip)


def _headers(*names: str) -> Described:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def path_parameter(name: str, description: str, schema: Described | None = None) -> Described:
    """Describes a parameter in the path."""
    schema = schema or {"type": "string", "minLength": 1, "maxLength": 255}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def query_parameter(name: str, description: str, schema: Described, *, is_required: bool = False) -> Described:
    """Describes a parameter in the query."""
    return {"name": name, "in": "query", "required": is_required, "description": description, "schema": schema}


TIMEOUT = query_parameter(
    "timeout_ms",
    "A request that cannot start by then is answered 504; also the header `X-Timeout-Ms`.",
    {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400_000},
)
IF_MATCH: Described = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "Versions, as in `ETag`: what is read or changed has one of them, or it is 412. `*` is any.",
    "schema": {"type": "string", "pattern": r'^(\*|(W/)?"[!#-~]*"( *, *(W/)?"[!#-~]*")*)$'},
}
IF_NONE_MATCH: Described = IF_MATCH | {
    "name": "If-None-Match",
    "description": "Versions that the caller has: where it is one of them, the answer is 304.",
}
RESIDENT: Described = {"type": "string", "pattern": "^@[A-Za-z0-9._/-]{1,255}$"}
