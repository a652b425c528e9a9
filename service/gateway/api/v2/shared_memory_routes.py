"""`/v2/systemsharedmemory` and `/v2/cudasharedmemory`: regions over HTTP. Verbs only; `shared_memory` does the work.

Status and unregistration answer whether shared memory is offered or not: load generators call them at the start of every run.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tilewire.service.errors import UnknownName
from tilewire.service.gateway.api.v2.shared_memory import (
    check_registration,
    describe_region,
    forget_regions,
    list_regions,
    no_cuda,
    parse_registration,
)
from tilewire.service.gateway.request.body import receive_body
from tilewire.service.gateway.request.context import Gateway, RequestContext, context_of
from tilewire.service.gateway.request.response import json_response

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"

MAX_REGISTRATION_BYTES = 2**16


def router(gateway: Gateway) -> APIRouter:
    """The routes of shared memory."""
    routes = APIRouter(tags=["shared memory"])
    _add_system(routes, gateway)
    _add_cuda(routes)
    return routes


def _add_system(routes: APIRouter, gateway: Gateway) -> None:
    @routes.get(f"{SYSTEM}/status", summary="The registered regions.", response_class=Response)
    async def status(request: Request) -> Response:
        found = await list_regions(gateway, context_of(request.scope).granted)
        return json_response([describe_region(one) for one in found])

    @routes.get(f"{SYSTEM}/region/{{region:path}}/status", summary="One region.", response_class=Response)
    async def status_of(region: str, request: Request) -> Response:
        found = await list_regions(gateway, context_of(request.scope).granted, region)
        return json_response([describe_region(one) for one in found])

    @routes.post(f"{SYSTEM}/region/{{region:path}}/register", summary="Register a region.", response_class=Response)
    async def register(region: str, request: Request) -> Response:
        context = context_of(request.scope)
        check_registration(gateway, context.granted)
        await _register(gateway, context, region)
        return Response()

    @routes.post(f"{SYSTEM}/region/{{region:path}}/unregister", summary="Forget a region.", response_class=Response)
    async def unregister(region: str, request: Request) -> Response:
        await forget_regions(gateway, context_of(request.scope).granted, region)
        return Response()

    @routes.post(f"{SYSTEM}/unregister", summary="Forget all regions.", response_class=Response)
    async def unregister_all(request: Request) -> Response:
        await forget_regions(gateway, context_of(request.scope).granted)
        return Response()


def _add_cuda(routes: APIRouter) -> None:
    """CUDA shared memory is not offered: there are no regions, and unregistering them is no error."""

    @routes.get(f"{CUDA}/status", summary="No regions: not offered.", response_class=Response)
    async def status() -> Response:
        return json_response([])

    @routes.get(f"{CUDA}/region/{{region:path}}/status", include_in_schema=False)
    async def status_of(region: str) -> Response:
        raise UnknownName(f"no CUDA shared memory region {region[:64]!r} is registered")

    @routes.post(f"{CUDA}/region/{{region:path}}/register", include_in_schema=False)
    async def register(region: str) -> Response:
        raise no_cuda(region)

    @routes.post(f"{CUDA}/region/{{region:path}}/unregister", include_in_schema=False)
    @routes.post(f"{CUDA}/unregister", summary="Nothing to forget.", response_class=Response)
    async def unregister() -> Response:
        return Response()


async def _register(gateway: Gateway, context: RequestContext, name: str) -> None:
    leases = gateway.admission.admit()
    try:
        lease = await receive_body(context, leases, MAX_REGISTRATION_BYTES, gateway.settings.body_timeout_s)
        region = parse_registration(name, bytes(lease.view))
        await gateway.engines.register_region(region)
    finally:
        leases.release()
