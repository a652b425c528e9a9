"""Defines one class per cause of failure. Owns the status, the code and whether to try again.

`gateway.request.response` writes the messages, in the form that the path asks for.
"""

from __future__ import annotations

from typing import ClassVar


class TilewireError(Exception):
    """Base of the tree.

    Attributes:
        status: The status of the HTTP contract.
        code: Closed, snake_case name of the cause; `reason` of `tilewire_rejected_total`.
        title: The cause in a few words, the same for every instance.
        retryable: Whether the same request can succeed a moment later.
        is_refusal: The request may be right, but this server would not do it: counted in `tilewire_rejected_total`.
        detail: Description of the mistake in this request, naming the field.
        retry_after_s: Seconds to wait before trying again, for retryable ones.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    retryable: ClassVar[bool] = False
    is_refusal: ClassVar[bool] = False

    def __init__(self, detail: str, *, retry_after_s: int = 1) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s


class InvalidRequest(TilewireError):
    """A body, shape, dtype, option or name that cannot be right."""

    status = 400
    code = "invalid_request"
    title = "Invalid request"


class AlreadyExists(TilewireError):
    """The name of a shared-memory region is taken."""

    status = 400
    code = "already_exists"
    title = "Already exists"


class NotOffered(TilewireError):
    """A feature that this server has turned off."""

    status = 400
    code = "not_offered"
    title = "Not offered"


class Unauthorized(TilewireError):
    """API keys are configured, and the request has none that is known."""

    status = 401
    code = "unauthorized"
    title = "Unauthorized"
    is_refusal = True


class Forbidden(TilewireError):
    """The key may not run this op or touch this tensor, or nobody may."""

    status = 403
    code = "forbidden"
    title = "Forbidden"
    is_refusal = True


class UnknownName(TilewireError):
    """No such op, model or tensor."""

    status = 404
    code = "not_found"
    title = "Not found"


class MethodNotAllowed(TilewireError):
    """The path exists, but not with this method."""

    status = 405
    code = "method_not_allowed"
    title = "Method not allowed"


class Lost(TilewireError):
    """A stored result was lost with its engine before a copy of it existed."""

    status = 410
    code = "lost"
    title = "Lost with the engine"


class LengthRequired(TilewireError):
    """The body has neither a Content-Length nor chunked encoding."""

    status = 411
    code = "length_required"
    title = "Length required"


class PreconditionFailed(TilewireError):
    """A resident tensor does not have the version that the request demands."""

    status = 412
    code = "precondition_failed"
    title = "Precondition failed"


class BodyTooLarge(TilewireError):
    """The body is over `max_body_bytes`, or inflates past it."""

    status = 413
    code = "body_too_large"
    title = "Body too large"
    is_refusal = True


class UnknownFormat(TilewireError):
    """The body or the asked-for answer is in a format that Tilewire does not speak."""

    status = 415
    code = "unknown_format"
    title = "Unknown format"


class BeyondLimit(TilewireError):
    """Understood, but over a configured limit: elements, rank or result size."""

    status = 422
    code = "beyond_limit"
    title = "Beyond a configured limit"
    is_refusal = True


class TooBusy(TilewireError):
    """The queue, or the memory for bodies and results, is full right now."""

    status = 429
    code = "too_busy"
    title = "Too busy"
    retryable = True
    is_refusal = True


class OverQuota(TilewireError):
    """The key has used up its requests or bytes per second."""

    status = 429
    code = "over_quota"
    title = "Over the key's quota"
    retryable = True
    is_refusal = True


class ClientGone(TilewireError):
    """The client left before its answer."""

    status = 499
    code = "client_gone"
    title = "Client closed the request"


class InternalError(TilewireError):
    """A bug of ours."""


class UnknownCoding(TilewireError):
    """The body has a transfer coding besides `chunked`."""

    status = 501
    code = "unknown_coding"
    title = "Unknown transfer coding"


class Unavailable(TilewireError):
    """Starting, draining, or the engine is restarting."""

    status = 503
    code = "unavailable"
    title = "Unavailable"
    retryable = True
    is_refusal = True


class DeadlinePassed(TilewireError):
    """The request's deadline passed before its result was there; one that had not started is not computed."""

    status = 504
    code = "deadline_passed"
    title = "Deadline passed"
    is_refusal = True


class ResidentQuota(TilewireError):
    """Storing the tensor would exceed `resident_bytes`."""

    status = 507
    code = "resident_quota"
    title = "Resident quota exceeded"
    is_refusal = True


class StoreFull(TilewireError):
    """The folder of `store` has no room for the file of a tensor."""

    status = 507
    code = "store_full"
    title = "Store full"
    is_refusal = True


BY_CODE: dict[str, type[TilewireError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        AlreadyExists,
        NotOffered,
        Unauthorized,
        Forbidden,
        UnknownName,
        MethodNotAllowed,
        Lost,
        LengthRequired,
        PreconditionFailed,
        BodyTooLarge,
        UnknownFormat,
        BeyondLimit,
        TooBusy,
        OverQuota,
        ClientGone,
        Unavailable,
        DeadlinePassed,
        ResidentQuota,
        StoreFull,
        UnknownCoding,
        InternalError,
    )
}
