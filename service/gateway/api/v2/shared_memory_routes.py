"""`/v2/systemsharedmemory` and `/v2/cudasharedmemory`: regions over HTTP. Verbs only; `shared_memory` does the work.

Status and unregistration answer whether shared memory is offered or not: load generators call them at the start of every run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from tilewire.service.gateway.api.openapi.inference import describe_region_call
from tilewire.service.gateway.api.openapi.parts import Described
from tilewire.service.gateway.api.v2.shared_memory import (
    check_no_cuda,
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
ONE = "/region/{region:path}"

Endpoint = Callable[[Request], Awaitable[Response]]


def router(gateway: Gateway) -> APIRouter:
    """The routes of shared memory."""
    routes = APIRouter(tags=["shared memory"], default_response_class=Response)

    async def status(request: Request) -> Response:
        access = context_of(request.scope).granted
        found = await list_regions(gateway, access, request.path_params.get("region"))
        return json_response([describe_region(one) for one in found])

    async def register(request: Request) -> Response:
        context = context_of(request.scope)
        check_registration(gateway, context.granted)
        text = await receive_text(gateway, context)
        await gateway.engines.register_region(parse_registration(request.path_params["region"], text))
        return Response()

    async def unregister(request: Request) -> Response:
        await forget_regions(gateway, context_of(request.scope).granted, request.path_params.get("region"))
        return Response()

    def add(
        method: str,
        path: str,
        endpoint: Endpoint,
        name: str = "",
        summary: str = "",
        described: Described | None = None,
    ) -> None:
        """Adds a route; those without a description are in no document."""
        routes.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=name or None,
            summary=summary,
            include_in_schema=described is not None,
            openapi_extra=described,
        )

    of_one, of_all = describe_region_call(), describe_region_call(is_one=False)
    all_status = describe_region_call(is_one=False, is_status=True)
    one_status, registration = describe_region_call(is_status=True), describe_region_call(is_registration=True)
    add("GET", f"{SYSTEM}/status", status, "shared_memory_status", "The registered regions.", all_status)
    add("GET", f"{SYSTEM}{ONE}/status", status, "shared_memory_region_status", "One region.", one_status)
    add("POST", f"{SYSTEM}{ONE}/register", register, "register_shared_memory", "Register a region.", registration)
    add("POST", f"{SYSTEM}{ONE}/unregister", unregister, "unregister_shared_memory", "Forget a region.", of_one)
    add("POST", f"{SYSTEM}/unregister", unregister, "unregister_all_shared_memory", "Forget all regions.", of_all)
    # CUDA shared memory is not offered: there are no regions, and unregistering them is no error.
    add("GET", f"{CUDA}/status", _no_regions, "cuda_shared_memory_status", "No regions: not offered.", all_status)
    add("GET", f"{CUDA}{ONE}/status", _no_regions)
    add("POST", f"{CUDA}{ONE}/register", _refuse_cuda)
    add("POST", f"{CUDA}{ONE}/unregister", _do_nothing)
    add("POST", f"{CUDA}/unregister", _do_nothing, "unregister_all_cuda_shared_memory", "Nothing to forget.", of_all)
    return routes


async def _no_regions(request: Request) -> Response:
    check_no_cuda(request.path_params.get("region", ""))
    return json_response([])


async def _refuse_cuda(request: Request) -> Response:
    raise no_cuda(request.path_params["region"])


async def _do_nothing(_request: Request) -> Response:
    return Response()
