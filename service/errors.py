"""Defines one class per cause of failure. Owns the statuses, the code and whether to try again.

`gateway.request.response` writes the messages, in the form that the path has.
"""

from __future__ import annotations

from typing import ClassVar


class TilewireError(Exception):
    """Base of the tree. A subclass states its attributes as keywords behind its bases.

    Attributes:
        status: The status of the HTTP contract.
        code: Closed, snake_case name of the cause; `reason` of `tilewire_rejected_total`.
        title: The cause in a few words, the same for every instance; the code in words where nothing else is said.
        rpc: Name of the status over gRPC.
        retryable: Whether the same request can succeed a moment later.
        is_refusal: The request may be right, but this server would not do it: counted in `tilewire_rejected_total`.
        detail: Description of the mistake in this request, naming the field.
        retry_after_s: Seconds to wait before trying again, for retryable ones.
    """

    status: ClassVar[int]
    code: ClassVar[str]
    title: ClassVar[str]
    rpc: ClassVar[str]
    retryable: ClassVar[bool]
    is_refusal: ClassVar[bool]

    def __init_subclass__(
        cls,
        *,
        status: int = 0,
        code: str = "",
        rpc: str = "",
        title: str = "",
        retryable: bool = False,
        is_refusal: bool = False,
    ) -> None:
        """Declares a cause, under its code in `BY_CODE`; a class without one is a case of its base's."""
        if not code:
            return
        cls.status, cls.code, cls.rpc = status, code, rpc
        cls.title = title or code.replace("_", " ").capitalize()
        cls.retryable, cls.is_refusal = retryable, is_refusal
        BY_CODE[code] = cls

    def __init__(self, detail: str, *, retry_after_s: int = 1) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s


BY_CODE: dict[str, type[TilewireError]] = {}


class InvalidRequest(TilewireError, status=400, code="invalid_request", rpc="INVALID_ARGUMENT"):
    """A body, shape, dtype, option or name that cannot be right."""


class AlreadyExists(TilewireError, status=400, code="already_exists", rpc="ALREADY_EXISTS"):
    """The name of a shared-memory region is taken."""


class NotOffered(TilewireError, status=400, code="not_offered", rpc="UNIMPLEMENTED"):
    """A feature that this server has turned off."""


class Unauthorized(TilewireError, status=401, code="unauthorized", rpc="UNAUTHENTICATED", is_refusal=True):
    """API keys are configured, and the request has none that is known."""


class Forbidden(TilewireError, status=403, code="forbidden", rpc="PERMISSION_DENIED", is_refusal=True):
    """The key may not run this op or touch this tensor, or nobody may."""


class UnknownName(TilewireError, status=404, code="not_found", rpc="NOT_FOUND"):
    """No such op, model or tensor."""


class MethodNotAllowed(TilewireError, status=405, code="method_not_allowed", rpc="UNIMPLEMENTED"):
    """The path exists, but not with this method."""


class Lost(TilewireError, status=410, code="lost", title="Lost with the engine", rpc="NOT_FOUND"):
    """A stored result was lost with its engine before a copy of it existed, or a new engine failed to bring a tensor back."""


class LengthRequired(TilewireError, status=411, code="length_required", rpc="INVALID_ARGUMENT"):
    """The body has neither a Content-Length nor chunked encoding."""


class PreconditionFailed(TilewireError, status=412, code="precondition_failed", rpc="FAILED_PRECONDITION"):
    """A resident tensor does not have the version that the request demands."""


class BodyTooLarge(TilewireError, status=413, code="body_too_large", rpc="RESOURCE_EXHAUSTED", is_refusal=True):
    """The body is over `max_body_bytes`, or inflates past it."""


class UnknownFormat(TilewireError, status=415, code="unknown_format", rpc="INVALID_ARGUMENT"):
    """The body, or the requested answer, is in a format that Tilewire does not have."""


class BeyondLimit(
    TilewireError,
    status=422,
    code="beyond_limit",
    title="Beyond a configured limit",
    rpc="INVALID_ARGUMENT",
    is_refusal=True,
):
    """Understood, but over a configured limit: elements, rank or result size."""


# A full queue is UNAVAILABLE with NVIDIA's server, and clients retry that by themselves.
class TooBusy(TilewireError, status=429, code="too_busy", rpc="UNAVAILABLE", retryable=True, is_refusal=True):
    """The queue, or the memory for bodies and results, is full right now."""


class OverQuota(
    TilewireError,
    status=429,
    code="over_quota",
    title="Over the key's quota",
    rpc="RESOURCE_EXHAUSTED",
    retryable=True,
    is_refusal=True,
):
    """The key has used up its requests or bytes per second."""


class ClientGone(TilewireError, status=499, code="client_gone", title="Client closed the request", rpc="CANCELLED"):
    """The client left before its answer."""


class Unavailable(TilewireError, status=503, code="unavailable", rpc="UNAVAILABLE", retryable=True, is_refusal=True):
    """Starting, draining, or the engine is restarting."""


class DeadlinePassed(TilewireError, status=504, code="deadline_passed", rpc="DEADLINE_EXCEEDED", is_refusal=True):
    """The request's deadline passed before it could start; it is not computed."""


class ResidentQuota(
    TilewireError,
    status=507,
    code="resident_quota",
    title="Resident quota exceeded",
    rpc="RESOURCE_EXHAUSTED",
    is_refusal=True,
):
    """Storing the tensor would exceed `resident_bytes`."""


class StoreFull(TilewireError, status=507, code="store_full", rpc="RESOURCE_EXHAUSTED", is_refusal=True):
    """The folder of `--store` has no room for the file of a tensor."""


class UnknownCoding(
    TilewireError, status=501, code="unknown_coding", title="Unknown transfer coding", rpc="UNIMPLEMENTED"
):
    """The body has a transfer coding besides `chunked`."""


class InternalError(TilewireError, status=500, code="internal", title="Internal error", rpc="INTERNAL"):
    """A bug of ours."""
