"""The errors of a call, one class for each cause. Holds statuses; no transport.

    TilewireError
    ├── ConnectionFailed        no answer: refused, reset or timed out
    ├── BadRequest              400, and other 4xx without a class of their own
    │   ├── Unauthorized        401  no API key, or an unknown one
    │   ├── Forbidden           403  the key may not use this op or tensor
    │   ├── NotFound            404  no such op, tensor or program
    │   ├── TooLarge            413  over the server's --max-body-bytes
    │   ├── Unprocessable       422  understood, but beyond a configured limit
    │   ├── PreconditionFailed  412  a resident has another version than `if_match` demands
    │   └── Lost                410  a stored result that was lost with the engine
    ├── Busy                    429  no room right now; `retry_after_s`
    └── ServerError             500, and other 5xx without a class of their own
        ├── Unavailable         503  starting, draining or restarting; `retry_after_s`
        ├── DeadlineExceeded    504  the deadline passed before the request could start
        └── QuotaExceeded       507  no room for another resident tensor

Source: the tree follows httpx's `_exceptions.py` in form.
"""

from __future__ import annotations


class TilewireError(Exception):
    """Base of the tree.

    Attributes:
        detail: Cause, in the server's words where it answered.
        status: HTTP status, or None without an answer.
        request_id: The server's id of the request, for its logs; None without an answer.
        retry_after_s: Seconds after which the server suggests to try again, where it does.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status
        self.request_id = request_id
        self.retry_after_s = retry_after_s


class ConnectionFailed(TilewireError):
    """No answer came: the connection was refused, reset or timed out, also after the retries.

    Attributes:
        was_broken: Whether it was refused or reset, rather than slow or not to be found.
        was_refused: Whether no connection came about, so that nothing was sent.
    """

    def __init__(self, detail: str, *, was_broken: bool = False, was_refused: bool = False) -> None:
        super().__init__(detail)
        self.was_broken = was_broken
        self.was_refused = was_refused


class BadRequest(TilewireError):
    """The request cannot be right; the detail names the field and what was expected."""


class Unauthorized(BadRequest):
    """The API key is missing or unknown."""


class Forbidden(BadRequest):
    """The API key does not allow this op or tensor."""


class NotFound(BadRequest):
    """No such op, tensor or program."""


class TooLarge(BadRequest):
    """The body is larger than the server takes."""


class Unprocessable(BadRequest):
    """Understood, but beyond a configured limit of the server."""


class PreconditionFailed(BadRequest):
    """A resident tensor does not have the version that `if_match` demands; nothing was changed or computed."""


class Lost(BadRequest):
    """The stored result was lost with the engine; compute it again, or store it with `durable`."""


class Busy(TilewireError):
    """The server has no room right now, also after the retries."""


class ServerError(TilewireError):
    """The server failed; the request id leads to its log."""


class Unavailable(ServerError):
    """The server is starting, draining or restarting its engine, also after the retries."""


class DeadlineExceeded(ServerError):
    """The deadline passed before the request could start; it is not computed."""


class QuotaExceeded(ServerError):
    """The server has no room for another resident tensor."""


_BY_STATUS: dict[int, type[TilewireError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    410: Lost,
    412: PreconditionFailed,
    413: TooLarge,
    422: Unprocessable,
    429: Busy,
    503: Unavailable,
    504: DeadlineExceeded,
    507: QuotaExceeded,
}


def class_for(status: int) -> type[TilewireError]:
    """The class that stands for an HTTP status of 400 or more."""
    return _BY_STATUS.get(status, BadRequest if status < 500 else ServerError)
