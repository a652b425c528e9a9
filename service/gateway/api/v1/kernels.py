"""`/v1/kernels`: what computes on each device. Verbs only; engines describe themselves."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from tilewire.service.gateway.api.openapi.native import describe_json
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.gateway.request.response import json_response


def router(gateway: Gateway) -> APIRouter:
    """The route of kernels."""
    routes = APIRouter(tags=["kernels"], default_response_class=Response)

    @routes.get(
        "/v1/kernels",
        summary="What is loaded on each device, and what was measured.",
        openapi_extra=describe_json("Devices", "A report of each device."),
    )
    async def kernels() -> Response:
        return json_response({"devices": [msgspec.Raw(report) for report in await gateway.engines.kernels()]})

    return routes
