"""Turns errors into the statuses of gRPC. A table: where NVIDIA's server has the same cause, the status is the same."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from tilewire.service.errors import (
    AlreadyExists,
    BeyondLimit,
    BodyTooLarge,
    ClientGone,
    DeadlinePassed,
    Forbidden,
    InternalError,
    InvalidRequest,
    LengthRequired,
    Lost,
    MethodNotAllowed,
    NotOffered,
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

CODES: Mapping[type[TilewireError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    NotOffered: grpc.StatusCode.UNIMPLEMENTED,
    Unauthorized: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    UnknownName: grpc.StatusCode.NOT_FOUND,
    MethodNotAllowed: grpc.StatusCode.UNIMPLEMENTED,
    Lost: grpc.StatusCode.NOT_FOUND,
    LengthRequired: grpc.StatusCode.INVALID_ARGUMENT,
    PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    BodyTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnknownFormat: grpc.StatusCode.INVALID_ARGUMENT,
    BeyondLimit: grpc.StatusCode.INVALID_ARGUMENT,
    # A full queue is UNAVAILABLE with NVIDIA's server, and clients retry that by themselves.
    TooBusy: grpc.StatusCode.UNAVAILABLE,
    OverQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ClientGone: grpc.StatusCode.CANCELLED,
    UnknownCoding: grpc.StatusCode.UNIMPLEMENTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    ResidentQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    InternalError: grpc.StatusCode.INTERNAL,
}

# Milliseconds until a client should try again; gRPC libraries with a retry policy obey it.
PUSHBACK, NEVER = "grpc-retry-pushback-ms", "-1"
RETRY_AFTER = "retry-after"


def code_of(error: TilewireError, *, is_timed: bool = False) -> grpc.StatusCode:
    """Returns the status of an error.

    Args:
        error: The error.
        is_timed: The request's own timeout ended first; NVIDIA's server has UNAVAILABLE for that.
    """
    return grpc.StatusCode.UNAVAILABLE if is_timed and isinstance(error, DeadlinePassed) else CODES[type(error)]


def hints_of(error: TilewireError) -> tuple[tuple[str, str], ...]:
    """Returns trailing metadata that say when to try again; a request whose time is over is not repeated by libraries."""
    if isinstance(error, DeadlinePassed):
        return ((PUSHBACK, NEVER),)
    if not error.retryable:
        return ()
    return (RETRY_AFTER, str(error.retry_after_s)), (PUSHBACK, str(1000 * error.retry_after_s))
