"""`/v2/systemsharedmemory` and `/v2/cudasharedmemory`: regions over HTTP. Verbs only; `shared_memory` does the work.

Status and unregistration answer whether shared memory is offered or not: load generators call them at the start of every run.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tilewire.service.errors import UnknownName
from tilewire.service.gateway.api.openapi.inference import describe_region_call
from tilewire.service.gateway.api.v2.shared_memory import (
    check_registration,
    describe_region,
    forget_regions,
    list_regions,
    no_cuda,
    parse_registration,
)
from tilewire.service.gateway.request.body import receive_text
from tilewire.service.gateway.request.context import Gateway, context_of
from tilewire.service.gateway.request.response import json_response

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"


def router(gateway: Gateway) -> APIRouter:
    """The routes of shared memory."""
    routes = APIRouter(tags=["shared memory"], default_response_class=Response)
    _add_system(routes, gateway)
    _add_cuda(routes)
    return routes


def _add_system(routes: APIRouter, gateway: Gateway) -> None:
    @routes.get(
        f"{SYSTEM}/status",
        name="shared_memory_status",
        summary="The registered regions.",
        openapi_extra=describe_region_call(is_one=False, is_status=True),
    )
    async def status(request: Request) -> Response:
        found = await list_regions(gateway, context_of(request.scope).granted)
        return json_response([describe_region(one) for one in found])

    @routes.get(
        f"{SYSTEM}/region/{{region:path}}/status",
        name="shared_memory_region_status",
        summary="One region.",
        openapi_extra=describe_region_call(is_status=True),
    )
    async def status_of(region: str, request: Request) -> Response:
        found = await list_regions(gateway, context_of(request.scope).granted, region)
        return json_response([describe_region(one) for one in found])

    @routes.post(
        f"{SYSTEM}/region/{{region:path}}/register",
        name="register_shared_memory",
        summary="Register a region.",
        openapi_extra=describe_region_call(is_registration=True),
    )
    async def register(region: str, request: Request) -> Response:
        context = context_of(request.scope)
        check_registration(gateway, context.granted)
        await gateway.engines.register_region(parse_registration(region, await receive_text(gateway, context)))
        return Response()

    @routes.post(
        f"{SYSTEM}/region/{{region:path}}/unregister",
        name="unregister_shared_memory",
        summary="Forget a region.",
        openapi_extra=describe_region_call(),
    )
    async def unregister(region: str, request: Request) -> Response:
        await forget_regions(gateway, context_of(request.scope).granted, region)
        return Response()

    @routes.post(
        f"{SYSTEM}/unregister",
        name="unregister_all_shared_memory",
        summary="Forget all regions.",
        openapi_extra=describe_region_call(is_one=False),
    )
    async def unregister_all(request: Request) -> Response:
        await forget_regions(gateway, context_of(request.scope).granted)
        return Response()


def _add_cuda(routes: APIRouter) -> None:
    """CUDA shared memory is not offered: there are no regions, and unregistering them is no error."""

    @routes.get(
        f"{CUDA}/status",
        name="cuda_shared_memory_status",
        summary="No regions: not offered.",
        openapi_extra=describe_region_call(is_one=False, is_status=True),
    )
    async def status() -> Response:
        return json_response([])

    @routes.get(f"{CUDA}/region/{{region:path}}/status", include_in_schema=False)
    async def status_of(region: str) -> Response:
        raise UnknownName(f"no CUDA shared memory region {region[:64]!r} is registered")

    @routes.post(f"{CUDA}/region/{{region:path}}/register", include_in_schema=False)
    async def register(region: str) -> Response:
        raise no_cuda(region)

    @routes.post(f"{CUDA}/region/{{region:path}}/unregister", include_in_schema=False)
    @routes.post(
        f"{CUDA}/unregister",
        name="unregister_all_cuda_shared_memory",
        summary="Nothing to forget.",
        openapi_extra=describe_region_call(is_one=False),
    )
    async def unregister() -> Response:
        return Response()
