"""What every error answer must be: problem details under `/v1`, `{"error": …}` under `/v2`."""

from __future__ import annotations

import re
from typing import Any

import httpx


def check_problem(response: httpx.Response, status: int, *named: str) -> dict[str, Any]:
    """RFC 9457, with the fields that the contract names, and a detail that names what is wrong."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem.keys() == {"type", "title", "status", "detail", "request_id"}
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    assert all(isinstance(problem[key], str) and problem[key] for key in ("type", "title", "detail"))
    for name in named:
        assert name in problem["detail"]
    assert not re.search(r"Traceback|\.py|0x[0-9a-f]{6,}|/tmp|/home|/usr", problem["detail"])
    return problem


def check_error(response: httpx.Response, status: int, *named: str) -> str:
    """An error in the protocol's form that says what is wrong and nothing of our insides."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, str] = response.json()
    assert error.keys() == {"error"}
    assert error["error"]
    for name in named:
        assert name in error["error"]
    assert not re.search(r"Traceback|\.py|0x[0-9a-f]{6,}|/tmp|/home|/usr", error["error"])
    return error["error"]
