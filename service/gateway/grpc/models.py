"""The calls that compute nothing: health, models, statistics, shared memory. Conversions only; `api.v2` does the work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message

from tilewire.service.errors import BodyTooLarge, UnknownName
from tilewire.service.gateway.api.health import why_not_ready
from tilewire.service.gateway.api.v2.models import (
    configure_model,
    describe_model,
    describe_server,
    find_model,
    index_models,
    statistics_for,
)
from tilewire.service.gateway.api.v2.shared_memory import (
    check_no_cuda,
    check_registration,
    describe_region,
    forget_regions,
    list_regions,
    make_region,
    no_cuda,
)
from tilewire.service.gateway.grpc import open_inference_pb2 as pb
from tilewire.service.gateway.grpc.call import RpcCall, Servicer, finish
from tilewire.service.gateway.grpc.calls import CONTENT_TYPE
from tilewire.service.gateway.grpc.paths import SERVICE
from tilewire.service.gateway.grpc.stream import RpcStream
from tilewire.service.gateway.grpc.wire import MessageT, inflate, is_compressed, parse
from tilewire.service.gateway.request.access_log import report
from tilewire.service.gateway.request.adapter import Answer
from tilewire.service.gateway.request.context import Gateway, RequestContext
from tilewire.service.gateway.request.handle import OK, admit
from tilewire.service.gateway.request.response import respond, respond_error

# Requests of these calls hold names and numbers.
MAX_REQUEST_BYTES = 2**16

# Computes the answer to a request; the context has the caller's rights.
Work = Callable[[MessageT, RequestContext], Awaitable[Message]]
Handler = Callable[[bytes, Servicer], Awaitable[bytes]]


class ModelCalls:
    """The calls by the names of their methods.

    Args:
        gateway: Parts.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.handlers: dict[str, Handler] = {}
        self._add("ServerLive", pb.ServerLiveRequest, self._server_live)
        self._add("ServerReady", pb.ServerReadyRequest, self._server_ready)
        self._add("ModelReady", pb.ModelReadyRequest, self._model_ready)
        self._add("ServerMetadata", pb.ServerMetadataRequest, self._server_metadata)
        self._add("ModelMetadata", pb.ModelMetadataRequest, self._model_metadata)
        self._add("ModelConfig", pb.ModelConfigRequest, self._model_config)
        self._add("ModelStatistics", pb.ModelStatisticsRequest, self._model_statistics)
        self._add("RepositoryIndex", pb.RepositoryIndexRequest, self._repository_index)
        self._add("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest, self._status)
        self._add("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest, self._register)
        self._add("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest, self._unregister)
        self._add("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest, self._cuda_status)
        self._add("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest, self._cuda_register)
        self._add("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest, self._cuda_unregister)

    def _add(self, name: str, kind: type[MessageT], work: Work[MessageT]) -> None:
        path = f"/{SERVICE}/{name}"

        async def answer(message: bytes, call: Servicer) -> bytes:
            opened = RpcCall(path, call)
            stream = RpcStream(opened.client_flow)
            stream.received_bytes = len(message)
            context = opened.context(opened.head(len(message)), stream)
            gateway = self._gateway
            try:
                admit(gateway, context)
                result = await work(read_request(kind, message), context)
                await respond(gateway, context, OK, Answer(CONTENT_TYPE, [result.SerializeToString()]))
            except Exception as error:  # noqa: BLE001  (the last line of defence: it is logged and answered)
                written = respond_error(gateway, context, error)
                assert written is None, "This is a bug: an answer is kept for its call."
            finally:
                report(gateway, context)
            return await finish(call, context, stream)

        self.handlers[path] = answer

    async def _server_live(self, _request: Message, _context: RequestContext) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, _request: Message, _context: RequestContext) -> Message:
        return pb.ServerReadyResponse(ready=why_not_ready(self._gateway) is None)

    async def _model_ready(self, request: pb.ModelReadyRequest, context: RequestContext) -> Message:
        reason = why_not_ready(self._gateway)
        if reason is None:
            try:
                await find_model(self._gateway, context, request.name, request.version or None)
            except UnknownName as error:
                # As NVIDIA's server answers: a model that is not there is not ready.
                reason = error.detail
        return pb.ModelReadyResponse(ready=reason is None)

    async def _server_metadata(self, _request: Message, _context: RequestContext) -> Message:
        return _filled(pb.ServerMetadataResponse(), describe_server(self._gateway))

    async def _model_metadata(self, request: pb.ModelMetadataRequest, context: RequestContext) -> Message:
        model = await find_model(self._gateway, context, request.name, request.version or None)
        return _filled(pb.ModelMetadataResponse(), describe_model(model))

    async def _model_config(self, request: pb.ModelConfigRequest, context: RequestContext) -> Message:
        model = await find_model(self._gateway, context, request.name, request.version or None)
        return _filled(pb.ModelConfigResponse(), {"config": configure_model(model)})

    async def _model_statistics(self, request: pb.ModelStatisticsRequest, context: RequestContext) -> Message:
        found = await statistics_for(self._gateway, context, request.name, request.version or None)
        return _filled(pb.ModelStatisticsResponse(), {"model_stats": found})

    async def _repository_index(self, request: pb.RepositoryIndexRequest, context: RequestContext) -> Message:
        is_ready = why_not_ready(self._gateway) is None
        models = await index_models(self._gateway, context, is_ready=is_ready)
        return _filled(pb.RepositoryIndexResponse(), {"models": models if is_ready or not request.ready else []})

    async def _status(self, request: pb.SystemSharedMemoryStatusRequest, context: RequestContext) -> Message:
        found = await list_regions(self._gateway, context.granted, request.name or None)
        return _filled(
            pb.SystemSharedMemoryStatusResponse(), {"regions": {one.name: describe_region(one) for one in found}}
        )

    async def _register(self, request: pb.SystemSharedMemoryRegisterRequest, context: RequestContext) -> Message:
        check_registration(self._gateway, context.granted)
        region = make_region(request.name, request.key, request.offset, request.byte_size)
        await self._gateway.engines.register_region(region)
        return pb.SystemSharedMemoryRegisterResponse()

    async def _unregister(self, request: pb.SystemSharedMemoryUnregisterRequest, context: RequestContext) -> Message:
        await forget_regions(self._gateway, context.granted, request.name or None)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def _cuda_status(self, request: pb.CudaSharedMemoryStatusRequest, _context: RequestContext) -> Message:
        check_no_cuda(request.name)
        return pb.CudaSharedMemoryStatusResponse()

    async def _cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest, _context: RequestContext) -> Message:
        raise no_cuda(request.name)

    async def _cuda_unregister(self, _request: Message, _context: RequestContext) -> Message:
        return pb.CudaSharedMemoryUnregisterResponse()


def read_request(kind: type[MessageT], message: bytes) -> MessageT:
    """Parses the request of a call, which may be compressed.

    Raises:
        InvalidRequest: It is none of that kind.
        BodyTooLarge: It is longer than such a request may be.
    """
    if is_compressed(message):
        message = inflate(message, MAX_REQUEST_BYTES)
    elif len(message) > MAX_REQUEST_BYTES:
        raise BodyTooLarge(f"request: {len(message)} bytes; the limit of such a request is {MAX_REQUEST_BYTES}")
    return parse(kind, message)


def _filled(message: MessageT, content: dict[str, object]) -> MessageT:
    """Fills a message with what HTTP answers; members that it has no field for are left out."""
    json_format.ParseDict(msgspec.to_builtins(content), message, ignore_unknown_fields=True)
    return message
