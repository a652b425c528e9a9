"""`/v2/systemsharedmemory` and `/v2/cudasharedmemory`: regions over HTTP. Verbs only; `engines` does the work.

Status and unregistration answer whether shared memory is offered or not: load generators call them at the start of every run.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tilewire.service.errors import InvalidRequest, UnknownName
from tilewire.service.gateway.api.v2.shared_memory import check_allowed, parse_registration, region_name
from tilewire.service.gateway.auth.authenticator import authorise
from tilewire.service.gateway.request.body import receive_text
from tilewire.service.gateway.request.context import Gateway, context_of
from tilewire.service.gateway.request.response import json_response
from tilewire.service.ipc.messages import RegionInfo

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"


def router(gateway: Gateway) -> APIRouter:
    """The routes of shared memory."""
    routes = APIRouter(tags=["shared memory"])
    _add_system(routes, gateway)
    _add_cuda(routes)
    return routes


def _add_system(routes: APIRouter, gateway: Gateway) -> None:
    @routes.get(f"{SYSTEM}/status", summary="The registered regions.", response_class=Response)
    async def status(request: Request) -> Response:
        _check_right(gateway, request)
        return json_response([_describe(one) for one in await gateway.engines.regions()])

    @routes.get(f"{SYSTEM}/region/{{region:path}}/status", summary="One region.", response_class=Response)
    async def status_of(region: str, request: Request) -> Response:
        _check_right(gateway, request)
        found = await gateway.engines.regions(region_name(region))
        return json_response([_describe(one) for one in found])

    @routes.post(f"{SYSTEM}/region/{{region:path}}/register", summary="Register a region.", response_class=Response)
    async def register(region: str, request: Request) -> Response:
        check_allowed(gateway.settings.allow_shared_memory)
        _check_right(gateway, request)
        body = await receive_text(gateway, context_of(request.scope))
        await gateway.engines.register_region(parse_registration(region, body))
        return Response()

    @routes.post(f"{SYSTEM}/region/{{region:path}}/unregister", summary="Forget a region.", response_class=Response)
    async def unregister(region: str, request: Request) -> Response:
        _check_right(gateway, request)
        await gateway.engines.unregister_region(region_name(region))
        return Response()

    @routes.post(f"{SYSTEM}/unregister", summary="Forget all regions.", response_class=Response)
    async def unregister_all(request: Request) -> Response:
        _check_right(gateway, request)
        await gateway.engines.unregister_region(None)
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
        raise InvalidRequest(f"CUDA shared memory is not offered, so {region[:64]!r} cannot be registered")

    @routes.post(f"{CUDA}/region/{{region:path}}/unregister", include_in_schema=False)
    @routes.post(f"{CUDA}/unregister", summary="Nothing to forget.", response_class=Response)
    async def unregister() -> Response:
        return Response()


def _check_right(gateway: Gateway, request: Request) -> None:
    """Refuses keys without the right, where there is shared memory; elsewhere any load generator may unregister nothing."""
    if gateway.settings.allow_shared_memory:
        authorise(context_of(request.scope).granted, shared_memory=True)


def _describe(region: RegionInfo) -> dict[str, object]:
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
