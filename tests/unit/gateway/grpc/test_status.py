"""Every error has a status of gRPC, and those that may be tried again say when."""

from __future__ import annotations

import grpc
import pytest

from tilewire.service.errors import BY_CODE, DeadlinePassed, TilewireError
from tilewire.service.gateway.grpc.status import PUSHBACK, RETRY_AFTER, code_of, hints_of


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=BY_CODE)
def test_every_error_has_a_status(kind: type[TilewireError]) -> None:
    error = kind("detail", retry_after_s=3)
    assert grpc.StatusCode[kind.rpc] is not grpc.StatusCode.OK
    assert code_of(error) is grpc.StatusCode[kind.rpc]
    if kind is not DeadlinePassed:
        assert code_of(error, is_timed=True) is grpc.StatusCode[kind.rpc]
        assert dict(hints_of(error)) == ({RETRY_AFTER: "3", PUSHBACK: "3000"} if kind.retryable else {})
    # Statuses that libraries try again by themselves are those of errors that may pass.
    assert (grpc.StatusCode[kind.rpc] is grpc.StatusCode.UNAVAILABLE) <= kind.retryable


def test_a_passed_deadline_is_the_calls_or_the_requests() -> None:
    error = DeadlinePassed("late")
    assert code_of(error) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert code_of(error, is_timed=True) is grpc.StatusCode.UNAVAILABLE
    # Nobody waits any more: a retry policy for UNAVAILABLE must not compute it again.
    assert hints_of(error) == ((PUSHBACK, "-1"),)
