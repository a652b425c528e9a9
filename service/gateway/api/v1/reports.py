"""`/v1/kernels` and `/v1/history`: reports of the engines, and of the supervisor's last ten minutes."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from tilewire.service.gateway.api.openapi.parts import describe_json
from tilewire.service.gateway.request.context import Gateway, context_of
from tilewire.service.gateway.request.response import json_response


def router(gateway: Gateway) -> APIRouter:
    """The routes of reports."""
    routes = APIRouter(default_response_class=Response)

    @routes.get(
        "/v1/kernels",
        tags=["kernels"],
        summary="What is loaded on each device, and what was measured.",
        openapi_extra=describe_json("Devices", "A report of each device."),
    )
    async def kernels() -> Response:
        return json_response({"devices": [msgspec.Raw(report) for report in await gateway.engines.kernels()]})

    @routes.get(
        "/v1/history",
        tags=["health"],
        summary="Requests, refusals and latency of the last ten minutes, and the last failures.",
        openapi_extra=describe_json("History", "Intervals, the oldest first; failures, the last one first."),
    )
    async def history(request: Request) -> Response:
        access = context_of(request.scope).granted
        sees_all = access.key is None or access.is_unlimited
        return json_response(await gateway.metrics.history(None if sees_all else access.name))

    return routes
