"""Answers probes and scrapers: live, ready and metrics. Verbs only."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tilewire.service.errors import Unavailable
from tilewire.service.gateway.api.openapi.document import add_route
from tilewire.service.gateway.api.openapi.native import describe_metrics
from tilewire.service.gateway.api.openapi.parts import describe_json, describe_ready
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.gateway.request.response import json_response


def router(gateway: Gateway) -> APIRouter:
    """The routes of probes and scrapers."""
    routes = APIRouter(tags=["health"], default_response_class=Response)

    async def live() -> Response:
        return json_response({"live": True})

    async def ready() -> Response:
        reason = why_not_ready(gateway)
        if reason is None:
            return json_response({"ready": True})
        retry_after = {"retry-after": "1"}
        body = {"ready": False, "error": reason, "engines": gateway.engines.states}
        return json_response(body, Unavailable.status, retry_after)

    described = describe_json("Live", "The process answers.", is_open=True)
    add_route(routes, "GET", "/healthz", live, "Alias of live.", described, "healthz")
    described = describe_json("Live", "The process answers.", is_open=True, is_oip=True)
    add_route(routes, "GET", "/v2/health/live", live, "Whether the process answers.", described)
    add_route(routes, "GET", "/readyz", ready, "Alias of ready.", describe_ready("Ready", is_oip=False), "readyz")
    add_route(routes, "GET", "/v2/health/ready", ready, "Whether requests are computed.", describe_ready("Ready"))
    return routes


def metrics_router(gateway: Gateway) -> APIRouter:
    """The route of scrapers."""
    routes = APIRouter(tags=["health"], default_response_class=Response)

    @routes.get("/metrics", summary="Prometheus exposition.", openapi_extra=describe_metrics())
    async def metrics(request: Request) -> Response:
        body, content_type = await gateway.metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return routes


def why_not_ready(gateway: Gateway) -> str | None:
    """The reason for a 503, or None while requests are computed."""
    if gateway.admission.is_draining:
        return "draining"
    return gateway.engines.why_not_ready
