"""`POST /v1/{op}`: documents of the native calls; `request.handle` answers them."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tilewire.service.gateway.api.openapi.native import describe_op
from tilewire.service.gateway.api.openapi.parts import Described
from tilewire.service.ops.registry import OPS


def router() -> APIRouter:
    """The native calls as routes: one for each op."""
    routes = APIRouter(tags=["ops"], default_response_class=Response)
    for op in OPS.values():
        add_described(routes, f"/v1/{op.name}", op.name, op.summary, describe_op(op))
    return routes


def add_described(routes: APIRouter, path: str, name: str, summary: str, described: Described) -> None:
    """Adds a POST that `request.handle` answers, for the OpenAPI document and for the router's 405."""
    routes.add_api_route(path, _answered_before, methods=["POST"], name=name, summary=summary, openapi_extra=described)


async def _answered_before() -> Response:
    raise AssertionError("This is a bug: ops are answered before the router.")
