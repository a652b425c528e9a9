"""`/v2/systemsharedmemory` and `/v2/cudasharedmemory`: regions over HTTP. Verbs only; `shared_memory` does the work.

Status and unregistration answer whether shared memory is offered or not: load generators call them at the start of every run.
"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from tilewire.service.gateway.api.openapi.document import add_route
from tilewire.service.gateway.api.openapi.inference import describe_region_call, describe_registration
from tilewire.service.gateway.api.v2 import shared_memory
from tilewire.service.gateway.codecs.strict_json import parse_object
from tilewire.service.gateway.request.body import receive_text
from tilewire.service.gateway.request.context import Gateway, context_of
from tilewire.service.gateway.request.response import json_response

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
ONE = "/region/{region:path}"


def router(gateway: Gateway) -> APIRouter:
    """The routes of shared memory."""
    routes = APIRouter(tags=["shared memory"], default_response_class=Response)

    async def status(request: Request) -> Response:
        access = context_of(request.scope).granted
        return json_response(await shared_memory.list_regions(gateway, access, request.path_params.get("region")))

    async def register(request: Request) -> Response:
        context = context_of(request.scope)
        shared_memory.check_registration(gateway, context.granted)
        # Other members are ignored, as Triton does.
        values = parse_object(await receive_text(gateway, context), "body")
        key, offset, byte_size = values.get("key"), values.get("offset", 0), values.get("byte_size")
        region = shared_memory.make_region(request.path_params["region"], key, offset, byte_size)
        await gateway.engines.register_region(region)
        return Response()

    async def unregister(request: Request) -> Response:
        access = context_of(request.scope).granted
        await shared_memory.forget_regions(gateway, access, request.path_params.get("region"))
        return Response()

    add = partial(add_route, routes)
    of_one, of_all = describe_region_call(), describe_region_call(is_one=False)
    all_status = describe_region_call(is_one=False, is_status=True)
    one_status, registration = describe_region_call(is_status=True), describe_registration()
    add("GET", f"{SYSTEM}/status", status, "The registered regions.", all_status, "shared_memory_status")
    add("GET", f"{SYSTEM}{ONE}/status", status, "One region.", one_status, "shared_memory_region_status")
    add("POST", f"{SYSTEM}{ONE}/register", register, "Register a region.", registration, "register_shared_memory")
    add("POST", f"{SYSTEM}{ONE}/unregister", unregister, "Forget a region.", of_one, "unregister_shared_memory")
    add("POST", f"{SYSTEM}/unregister", unregister, "Forget all regions.", of_all, "unregister_all_shared_memory")
    # CUDA shared memory is not offered: there are no regions, and unregistering them is no error.
    add("GET", f"{CUDA}/status", _no_regions, "No regions: not offered.", all_status, "cuda_shared_memory_status")
    add("GET", f"{CUDA}{ONE}/status", _no_regions)
    add("POST", f"{CUDA}{ONE}/register", _refuse_cuda)
    add("POST", f"{CUDA}{ONE}/unregister", _do_nothing)
    add("POST", f"{CUDA}/unregister", _do_nothing, "Nothing to forget.", of_all, "unregister_all_cuda_shared_memory")
    return routes


async def _no_regions(request: Request) -> Response:
    shared_memory.check_no_cuda(request.path_params.get("region", ""))
    return json_response([])


async def _refuse_cuda(request: Request) -> Response:
    raise shared_memory.no_cuda(request.path_params["region"])


async def _do_nothing(_request: Request) -> Response:
    return Response()
