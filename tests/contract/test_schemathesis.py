"""Requests that schemathesis makes of our OpenAPI document: no 5xx, and only statuses, types and bodies that it describes.

`SCHEMATHESIS_EXAMPLES` says how many requests each operation gets.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

from tests.conftest import SMALL, StartServer

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.checks")

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "30"))
# The document describes what a client may send; whether refusals are as strict as JSON Schema would be is another matter.
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@schemathesis.serializer(
    "application/x-safetensors", "application/x-npz", "application/x-npy", "application/octet-stream"
)
def as_it_is(_context: Any, value: Any) -> bytes:
    """Bytes of a binary body."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


@pytest.mark.timeout(900)
def test_what_the_document_describes_is_what_the_server_does(start_server: StartServer) -> None:
    # Programs and tensors that it makes stay there.
    server = start_server(*SMALL)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    checks.load_all_checks()
    wanted = [checks.CHECKS.get_one(name) for name in CHECKS]
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 30
    problems: dict[str, str] = {}
    num_requests = 0
    for operation in operations:

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def ask(case: Any) -> None:
            nonlocal num_requests
            num_requests += 1
            response = case.call(timeout=30)
            # JSON has no word for them, so no schema describes them.
            has_bare = any(word in response.content for word in (b"NaN", b"Infinity"))
            # Whoever gives a request no time gets what the contract says.
            is_too_late = response.status_code == 504 and "timeout" in str(response.request.url) + str(
                response.request.headers
            )
            try:
                case.validate_response(response, checks=wanted[is_too_late : -1 if has_bare else None])
            except BaseException as error:
                error.add_note(f"{response.status_code} to {case.query}: {response.content[:400]!r}")
                raise

        try:
            ask()
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  (every operation is tried, and all problems are shown)
            problems[operation.label] = _text_of(error)
    assert num_requests > 3 * len(operations)
    assert not problems, "\n\n".join(f"{label}: {text}" for label, text in problems.items())


def _text_of(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join((*map(_text_of, error.exceptions), *getattr(error, "__notes__", ())))
    return "\n".join((f"{type(error).__name__}: {str(error)[:4000]}", *getattr(error, "__notes__", ())))
