"""`POST /v1/{op}`: documents of the native calls; `request.handle` answers them."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tilewire.service.gateway.api.openapi.document import add_route
from tilewire.service.gateway.api.openapi.native import describe_op
from tilewire.service.ops.registry import OPS


def router() -> APIRouter:
    """The native calls as routes: one for each op."""
    routes = APIRouter(tags=["ops"], default_response_class=Response)
    for op in OPS.values():
        add_route(routes, "POST", f"/v1/{op.name}", answered_before, op.summary, describe_op(op), op.name)
    return routes


async def answered_before() -> Response:
    """Stands for what `request.handle` answers, in the OpenAPI document and in the router's 405."""
    raise AssertionError("This is a bug: ops are answered before the router.")
