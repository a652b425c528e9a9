"""`/v1/tensors`: resident tensors over HTTP. Verbs only; `engines` does the work."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from tilewire.service.errors import InvalidRequest, Unavailable, UnknownFormat
from tilewire.service.gateway.api.openapi.document import add_routes
from tilewire.service.gateway.api.openapi.native import describe_tensors
from tilewire.service.gateway.api.v1.calls import encoder_for, read_tensors
from tilewire.service.gateway.api.v1.query import check_name, parse_placement, refuse_parameters
from tilewire.service.gateway.auth.authenticator import Access, authorise
from tilewire.service.gateway.codecs.negotiation import codec_for_accept
from tilewire.service.gateway.request.body import receive_body, refuse_encodings
from tilewire.service.gateway.request.context import Gateway, RequestContext, context_of
from tilewire.service.gateway.request.handle import MAX_PLANS, OK, change_of, match_of, reserve_answer
from tilewire.service.gateway.request.head import Head
from tilewire.service.gateway.request.offload import offload
from tilewire.service.gateway.request.response import Answered, describe_tensor, json_response, respond, timestamp
from tilewire.service.ipc.messages import TensorInfo, Upload
from tilewire.service.match import entity_tag, is_known
from tilewire.service.ops.op import check_limits
from tilewire.service.ops.program.definition import NO_TENSORS
from tilewire.service.ops.registry import is_program
from tilewire.service.placement import Placement

TENSORS, TENSOR_PATH = "/v1/tensors", "/v1/tensors/{name:path}"
# Name in the answer of a tensor whose own name means something else there.
UNNAMED = "tensor"
# The description of a tensor with a short name, as text.
DESCRIBED_BYTES = 240


def router(gateway: Gateway) -> APIRouter:
    """The routes of resident tensors."""

    async def list_tensors(request: Request) -> Response:
        access = context_of(request.scope).granted
        infos = await gateway.engines.infos()
        return json_response(await offload(len(infos) * DESCRIBED_BYTES, _describe_all, infos, access))

    async def put_tensor(name: str, request: Request) -> Response:
        context = context_of(request.scope)
        authorise(context.granted, write=[check_name(name, field="name")])
        placement, axis = parse_placement(context.head.query)
        info, was_there = await _put(gateway, context, name, placement, axis)
        return json_response(describe_tensor(info), 200 if was_there else 201, {"etag": entity_tag(info.tag)})

    async def get_tensor(name: str, request: Request) -> Response:
        context = context_of(request.scope)
        authorise(context.granted, read=[check_name(name, field="name")])
        refuse_parameters(context.head.query)
        return await _download(gateway, context, name)

    async def head_tensor(name: str, request: Request) -> Response:
        authorise(context_of(request.scope).granted, read=[check_name(name, field="name")])
        head = context_of(request.scope).head
        refuse_parameters(head.query)
        info = await gateway.engines.describe(name, match=match_of(head))
        await gateway.engines.check_held(info)
        if _is_known(head, info):
            return Response(status_code=304, headers=_headers(info))
        content_type = None
        with contextlib.suppress(UnknownFormat):
            content_type = codec_for_accept(head.headers.get("accept"), None, [info.type.dtype]).content_type
        response = Response(headers=_headers(info), media_type=content_type)
        # It takes the tensor itself to know it.
        del response.headers["content-length"]
        return response

    async def delete_tensor(name: str, request: Request) -> Response:
        authorise(context_of(request.scope).granted, write=[check_name(name, field="name")])
        head = context_of(request.scope).head
        refuse_parameters(head.query)
        await gateway.engines.delete(name, change_of(head))
        return Response(status_code=204)

    routes, described = APIRouter(tags=["tensors"], default_response_class=Response), describe_tensors()
    add_routes(
        routes,
        described,
        ("GET", TENSORS, list_tensors, "List the resident tensors."),
        ("PUT", TENSOR_PATH, put_tensor, "Make a tensor resident, or replace it."),
        ("GET", TENSOR_PATH, get_tensor, "Fetch a tensor."),
        ("HEAD", TENSOR_PATH, head_tensor, "Describe a tensor in headers."),
        ("DELETE", TENSOR_PATH, delete_tensor, "Forget a tensor."),
    )
    return routes


def _describe_all(infos: Sequence[TensorInfo], access: Access) -> msgspec.Raw:
    """Describes the tensors that may be read, as JSON."""
    return msgspec.Raw(
        msgspec.json.encode(
            [describe_tensor(info) for info in infos if access.may_read(info.name) and not is_program(info.name)]
        )
    )


async def _put(
    gateway: Gateway, context: RequestContext, name: str, placement: Placement | None, axis: int
) -> tuple[TensorInfo, bool]:
    settings, match = gateway.settings, change_of(context.head)
    with gateway.admission.admit(context.flow) as leases:
        gateway.engines.check_ready()
        refuse_encodings(context.head)
        body = await receive_body(gateway, context, leases, settings.max_body_bytes)
        content_type = context.head.headers.get("content-type")
        _, tensors = await read_tensors(content_type, body, leases, settings.max_json_bytes)
        if len(tensors) != 1:
            raise InvalidRequest(f"body: {len(tensors)} tensors; expected exactly one")
        (tensor,) = tensors.values()
        check_limits(name, tensor.type, settings.limits)
        source = Upload(tensor.type, tensor.offset, fortran=tensor.fortran)
        return await gateway.engines.put(name, source, placement, axis, match)


async def _download(gateway: Gateway, context: RequestContext, name: str) -> Response:
    match = match_of(context.head)
    with gateway.admission.admit(context.flow) as leases:
        for _attempt in range(MAX_PLANS):
            info = await gateway.engines.describe(name, match=match)
            if _is_known(context.head, info):
                await gateway.engines.check_held(info)
                return Response(status_code=304, headers=_headers(info))
            codec = codec_for_accept(context.head.headers.get("accept"), None, [info.type.dtype])
            reserve_answer(context, info.type.nbytes)
            lease = await leases.wait(info.type.nbytes, is_result=True)
            written = await gateway.engines.download(info, lease.offset, match)
            if written is not None:
                encoder = encoder_for(codec, {UNNAMED if name in NO_TENSORS else name: written.type})
                answer = await offload(encoder.work_bytes, encoder.encode, [lease.view])
                answer.lines = "".join(f"{field}: {value}\r\n" for field, value in _headers(written).items())
                await respond(gateway, context, OK, answer)
                return Answered()
            leases.give_back(lease)
    raise Unavailable("the tensor keeps changing its shape")


def _is_known(head: Head, info: TensorInfo) -> bool:
    return is_known(head.headers.get("if-none-match"), entity_tag(info.tag))


def _headers(info: TensorInfo) -> dict[str, str]:
    times = {"x-tensor-created": timestamp(info.created), "x-tensor-last-used": timestamp(info.last_used)}
    return {
        "etag": entity_tag(info.tag),
        # A version has the same tag in each format.
        "vary": "accept",
        "x-tensor-name": info.name,
        "x-tensor-dtype": info.type.dtype,
        "x-tensor-shape": ",".join(map(str, info.type.shape)),
        "x-tensor-bytes": str(info.type.nbytes),
        "x-tensor-hits": str(info.hits),
        **{name: value for name, value in times.items() if value is not None},
    }
