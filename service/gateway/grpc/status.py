"""Turns errors into the statuses of gRPC: where NVIDIA's server has the same cause, the status is the same."""

from __future__ import annotations

import grpc

from tilewire.service.errors import DeadlinePassed, TilewireError

# Milliseconds until a client should try again; gRPC libraries with a retry policy obey it.
PUSHBACK, NEVER = "grpc-retry-pushback-ms", "-1"
RETRY_AFTER = "retry-after"


def code_of(error: TilewireError, *, is_timed: bool = False) -> grpc.StatusCode:
    """Returns the status of an error.

    Where the request's own timeout ended first (`is_timed`), NVIDIA's server has UNAVAILABLE.
    """
    if is_timed and isinstance(error, DeadlinePassed):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode[error.rpc]


def hints_of(error: TilewireError) -> tuple[tuple[str, str], ...]:
    """Returns trailing metadata that say when to try again; a request whose time is over is not repeated by libraries."""
    if isinstance(error, DeadlinePassed):
        return ((PUSHBACK, NEVER),)
    if not error.retryable:
        return ()
    return (RETRY_AFTER, str(error.retry_after_s)), (PUSHBACK, str(1000 * error.retry_after_s))
