"""Every error has a status of gRPC, and those that may be tried again say when."""

from __future__ import annotations

import grpc
import pytest

from tilewire.service.errors import BY_CODE, TilewireError
from tilewire.service.gateway.grpc.status import PUSHBACK, RETRY_AFTER, code_of, hints_of


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=BY_CODE)
def test_every_error_has_a_status(kind: type[TilewireError]) -> None:
    error = kind("detail", retry_after_s=3)
    assert code_of(error) is not grpc.StatusCode.OK
    assert dict(hints_of(error)) == ({RETRY_AFTER: "3", PUSHBACK: "3000"} if kind.retryable else {})
    # Statuses that libraries try again by themselves are those of errors that may pass.
    assert (code_of(error) is grpc.StatusCode.UNAVAILABLE) <= kind.retryable
