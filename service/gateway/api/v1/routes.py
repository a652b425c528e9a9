"""`POST /v1/{op}`: paths and documents of the native calls; `request.handle` answers them."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tilewire.service.gateway.api.openapi.native import describe_op
from tilewire.service.gateway.api.v1.calls import NativeApi
from tilewire.service.gateway.request.adapter import Api
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.ops.op import AnyOp
from tilewire.service.ops.registry import OPS


def op_paths(gateway: Gateway) -> dict[str, tuple[Api, AnyOp]]:
    """The native calls by exact path."""
    api = NativeApi(gateway.settings.max_json_bytes)
    return {f"/v1/{op.name}": (api, op) for op in OPS.values()}


def router() -> APIRouter:
    """The same calls as routes: one for each op, for the OpenAPI document and for the router's 405."""
    routes = APIRouter(tags=["ops"], default_response_class=Response)
    for op in OPS.values():
        routes.add_api_route(
            f"/v1/{op.name}",
            _answered_before,
            methods=["POST"],
            name=op.name,
            summary=op.summary,
            openapi_extra=describe_op(op),
        )
    return routes


async def _answered_before() -> Response:
    raise AssertionError("This is a bug: ops are answered before the router.")
