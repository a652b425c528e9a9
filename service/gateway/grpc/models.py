"""The calls that compute nothing: health, models, statistics, shared memory. Conversions only; `api.v2` does the work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from google.protobuf import json_format

from tilewire.service.errors import BodyTooLarge, UnknownName
from tilewire.service.gateway.api.health import why_not_ready
from tilewire.service.gateway.api.v2 import models, shared_memory
from tilewire.service.gateway.grpc import open_inference_pb2 as pb
from tilewire.service.gateway.grpc.call import RpcCall, Servicer, finish
from tilewire.service.gateway.grpc.calls import CONTENT_TYPE
from tilewire.service.gateway.grpc.paths import SERVICE
from tilewire.service.gateway.grpc.stream import RpcStream
from tilewire.service.gateway.grpc.wire import Inflater, MessageT, is_compressed, parse
from tilewire.service.gateway.request.access_log import report
from tilewire.service.gateway.request.adapter import Answer
from tilewire.service.gateway.request.context import Gateway, RequestContext
from tilewire.service.gateway.request.handle import OK, admit
from tilewire.service.gateway.request.response import respond, respond_error

# Requests of these calls hold names and numbers.
MAX_REQUEST_BYTES = 2**16

# Models that are converted before others have their turn: 0.1 ms each. A call of another client takes some five turns.
MODELS_AT_ONCE = 4

# Members of an answer, as over HTTP: those that the message has no field for are left out.
Content = dict[str, object]
Handler = Callable[[bytes, Servicer], Awaitable[bytes]]


class ModelCalls:
    """The calls by the names of their methods. Each computes the answer to a request; the context has the caller's rights."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        works: dict[str, Callable[[Any, RequestContext], Awaitable[Content]]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "SystemSharedMemoryStatus": self._status,
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
        }
        self.handlers = {name: self._handler(name, work) for name, work in works.items()}

    def _handler(self, name: str, work: Callable[[Any, RequestContext], Awaitable[Content]]) -> Handler:
        gateway, path = self._gateway, f"/{SERVICE}/{name}"
        asked, answered = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")

        async def answer(message: bytes, call: Servicer) -> bytes:
            opened = RpcCall(path, call)
            stream = RpcStream(opened.client_flow)
            stream.received_bytes = len(message)
            context = opened.context(opened.head(len(message)), stream)
            try:
                admit(gateway, context)
                result = await message_of(await work(read_request(asked, message), context), answered)
                await respond(gateway, context, OK, Answer(CONTENT_TYPE, [result.SerializeToString()]))
            except Exception as error:  # noqa: BLE001  (the last line of defence: it is logged and answered)
                written = respond_error(gateway, context, error)
                assert written is None, "This is a bug: an answer is kept for its call."
            finally:
                report(gateway, context)
            return await finish(call, context, stream)

        return answer

    async def _server_live(self, _request: pb.ServerLiveRequest, _context: RequestContext) -> Content:
        return {"live": True}

    async def _server_ready(self, _request: pb.ServerReadyRequest, _context: RequestContext) -> Content:
        return {"ready": why_not_ready(self._gateway) is None}

    async def _model_ready(self, request: pb.ModelReadyRequest, context: RequestContext) -> Content:
        is_ready = why_not_ready(self._gateway) is None
        if is_ready:
            try:
                await self._find(request, context)
            except UnknownName:
                # As NVIDIA's server answers: a model that is not there is not ready.
                is_ready = False
        return {"ready": is_ready}

    async def _server_metadata(self, _request: pb.ServerMetadataRequest, _context: RequestContext) -> Content:
        return models.describe_server(self._gateway)

    async def _model_metadata(self, request: pb.ModelMetadataRequest, context: RequestContext) -> Content:
        return models.describe_model(await self._find(request, context))

    async def _model_config(self, request: pb.ModelConfigRequest, context: RequestContext) -> Content:
        return {"config": models.configure_model(await self._find(request, context))}

    async def _find(
        self, request: pb.ModelReadyRequest | pb.ModelMetadataRequest | pb.ModelConfigRequest, context: RequestContext
    ) -> models.Model:
        return await models.find_model(self._gateway, context, request.name, request.version or None)

    async def _model_statistics(self, request: pb.ModelStatisticsRequest, context: RequestContext) -> Content:
        return await models.describe_statistics(self._gateway, context, request.name, request.version or None)

    async def _repository_index(self, request: pb.RepositoryIndexRequest, context: RequestContext) -> Content:
        return {"models": await models.index_models(self._gateway, context, only_ready=request.ready)}

    async def _status(self, request: pb.SystemSharedMemoryStatusRequest, context: RequestContext) -> Content:
        found = await shared_memory.list_regions(self._gateway, context.granted, request.name or None)
        return {"regions": {region["name"]: region for region in found}}

    async def _register(self, request: pb.SystemSharedMemoryRegisterRequest, context: RequestContext) -> Content:
        shared_memory.check_registration(self._gateway, context.granted)
        region = shared_memory.make_region(request.name, request.key, request.offset, request.byte_size)
        await self._gateway.engines.register_region(region)
        return {}

    async def _unregister(self, request: pb.SystemSharedMemoryUnregisterRequest, context: RequestContext) -> Content:
        await shared_memory.forget_regions(self._gateway, context.granted, request.name or None)
        return {}

    async def _cuda_status(self, request: pb.CudaSharedMemoryStatusRequest, _context: RequestContext) -> Content:
        shared_memory.check_no_cuda(request.name)
        return {}

    async def _cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest, _context: RequestContext) -> Content:
        raise shared_memory.no_cuda(request.name)

    async def _cuda_unregister(self, _request: pb.CudaSharedMemoryUnregisterRequest, _ctx: RequestContext) -> Content:
        return {}


async def message_of(content: Content, kind: type[MessageT]) -> MessageT:
    """Converts the members of an answer to its message; a long list in parts, between which others have their turn."""
    result: MessageT = kind()
    for name, value in content.items():
        parts: list[object] = [value]
        if isinstance(value, list):
            parts = [value[begin : begin + MODELS_AT_ONCE] for begin in range(0, len(value), MODELS_AT_ONCE)]
        for number, part in enumerate(parts):
            if number:
                await asyncio.sleep(0)
            member = msgspec.to_builtins({name: part})
            result.MergeFrom(json_format.ParseDict(member, kind(), ignore_unknown_fields=True))
    return result


def read_request(kind: type[MessageT], message: bytes) -> MessageT:
    """Parses the request of a call, which may be compressed.

    Raises:
        InvalidRequest: It is none of that kind.
        BodyTooLarge: It is longer than such a request may be.
    """
    if is_compressed(message):
        inflater = Inflater(message, MAX_REQUEST_BYTES)
        while inflater.step():
            pass
        message = bytes(inflater.inflated)
    elif len(message) > MAX_REQUEST_BYTES:
        raise BodyTooLarge(f"request: {len(message)} bytes; the limit of such a request is {MAX_REQUEST_BYTES}")
    return parse(kind, message)
