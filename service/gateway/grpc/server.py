"""The gRPC server of a gateway: its port, its methods, health and reflection. Implements `process.Server`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tilewire.service.config.process import TlsSettings
from tilewire.service.errors import TilewireError
from tilewire.service.gateway.api.health import why_not_ready
from tilewire.service.gateway.connection.limits import DRAIN_GRACE_S
from tilewire.service.gateway.grpc.call import RpcCall, Servicer
from tilewire.service.gateway.grpc.health import HealthCalls
from tilewire.service.gateway.grpc.infer import InferCalls
from tilewire.service.gateway.grpc.models import ModelCalls, read_request
from tilewire.service.gateway.grpc.open_inference_pb2 import DESCRIPTOR
from tilewire.service.gateway.grpc.paths import HEALTH_SERVICE, REFLECTION_SERVICES, SERVICE
from tilewire.service.gateway.grpc.status import code_of
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.tls import TlsError, make_context, watch_certificate

logger = logging.getLogger(__name__)

# A client may ping an idle connection this often; the library's own bound would close connections of clients that do.
MIN_PING_MS = 10_000
# Largest number that the library takes. As a time it means no bound; messages of the protocol are no longer.
MAX_NUMBER = 2**31 - 1
# Logger of the library's server.
LIBRARY = "grpc._cython.cygrpc"


class GrpcServer:
    """The server; see `process.Server` for the calls.

    Attributes:
        is_listening: Set when it takes connections.
        port: Port that it listens on, once it does.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._health = HealthCalls()
        self._server: grpc.aio.Server | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.is_listening = asyncio.Event()
        self.port = 0

    async def serve(self) -> None:
        """Serves until it is closed.

        Raises:
            TlsError: A file of TLS cannot be used.
            RuntimeError: The port cannot be had.
        """
        settings = self._gateway.settings
        # Of connections the library takes fewer than its largest number: it aborts at that.
        max_connections = min(settings.max_connections, MAX_NUMBER - 1)
        logging.getLogger(LIBRARY).addFilter(is_news)
        self._server = server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", min(settings.max_body_bytes, MAX_NUMBER)),
                ("grpc.max_send_message_length", -1),
                # Far more than are answered at once: those above that are refused, not kept waiting.
                ("grpc.max_concurrent_streams", max_connections),
                ("grpc.max_allowed_incoming_connections", max_connections),
                ("grpc.max_connection_idle_ms", _milliseconds(settings.keep_alive_s)),
                # Until the client's first frame is in.
                ("grpc.server_handshake_timeout_ms", _milliseconds(settings.body_timeout_s)),
                # A client that vanished during a call answers no ping.
                ("grpc.keepalive_time_ms", _milliseconds(settings.body_timeout_s)),
                ("grpc.http2.ping_timeout_ms", _milliseconds(settings.body_timeout_s)),
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
                # The library would inflate without a bound: see `Inflater`.
                ("grpc.per_message_decompression", 0),
                # The supervisor has the port, and restarts us on it.
                ("grpc.so_reuseport", 1),
            )
        )
        server.add_generic_rpc_handlers(self._handlers())
        if settings.tls is None:
            self.port = server.add_insecure_port(settings.grpc_address)
        else:
            credentials = credentials_of(settings.tls, self._gateway.metrics.follow_file("certificate"))
            self.port = server.add_secure_port(settings.grpc_address, credentials)
        self.observe_readiness()
        await server.start()
        self.is_listening.set()
        await server.wait_for_termination()

    def observe_readiness(self) -> None:
        """Reports engines that came or went to health watchers."""
        self._health.set(is_ready=why_not_ready(self._gateway) is None)

    def close(self) -> None:
        """Takes no more calls; those under way have a moment, such as streams without a request."""
        if self._server is not None:
            self._spawn(self._server.stop(DRAIN_GRACE_S))

    def abort(self) -> None:
        if self._server is not None:
            self._spawn(self._server.stop(0))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        infer, models = InferCalls(self._gateway), ModelCalls(self._gateway)
        inference = {name: grpc.unary_unary_rpc_method_handler(work) for name, work in models.handlers.items()}
        # On the wire the same as a call with one message: but this handler says when the message is read.
        inference["ModelInfer"] = grpc.stream_unary_rpc_method_handler(infer.infer)
        inference["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(infer.infer_stream)
        names = (SERVICE, HEALTH_SERVICE, REFLECTION_SERVICES[-1])
        servicer = reflection.aio.ReflectionServicer(names, pool=reflected_pool())
        services = {SERVICE: inference, HEALTH_SERVICE: self._health.handlers}
        for name in REFLECTION_SERVICES:
            reflected = grpc.stream_stream_rpc_method_handler(
                self._guarded(f"/{name}/ServerReflectionInfo", servicer.ServerReflectionInfo),
                response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
            )
            services[name] = {"ServerReflectionInfo": reflected}
        return [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]

    def _guarded(self, path: str, work: Callable[..., AsyncIterator[object]]) -> Callable[..., AsyncIterator[object]]:
        """Reflection with the check of keys, as documents over HTTP have it."""

        async def checked(messages: AsyncIterator[bytes], call: Servicer) -> AsyncIterator[object]:
            kind = reflection_pb2.ServerReflectionRequest
            try:
                self._gateway.authenticator.identify(path, RpcCall(path, call).identity)
                async for answer in work((read_request(kind, message) async for message in messages), call):
                    yield answer
            except TilewireError as error:
                await call.abort(code_of(error), error.detail)

        return checked


def _milliseconds(seconds: float) -> int:
    """A time for the library, which takes whole numbers of 32 bits."""
    return max(1, int(min(1000 * seconds, MAX_NUMBER)))


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record of the library is to be logged: an answer whose client left as it was sent is no error."""
    return not record.getMessage().startswith("ExecuteBatchError")


def reflected_pool() -> descriptor_pool.DescriptorPool:
    """Descriptors of every service that reflection shows; ours are in no shared pool."""
    pool = descriptor_pool.DescriptorPool()
    alpha = reflection_pb2.DESCRIPTOR.serialized_pb
    for data in (DESCRIPTOR.serialized_pb, health_pb2.DESCRIPTOR.serialized_pb, alpha):
        pool.AddSerializedFile(data)
    return pool


def credentials_of(tls: TlsSettings, report: Callable[[bool], object]) -> grpc.ServerCredentials:
    """TLS from the same files as over HTTP; the certificate was read again when its files change.

    Raises:
        TlsError: One cannot be used.
    """
    watch = watch_certificate(tls, report)

    def configuration() -> object:
        make_context(tls)
        pair = Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes()
        if not is_taken(pair):
            raise TlsError(
                f"{tls.certificate}: gRPC serves no key of this kind; RSA, P-256 and P-384 work with every client"
            )
        client_ca = None if tls.client_ca is None else Path(tls.client_ca).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_ca)

    def read() -> object:
        found = configuration()
        logger.info("the certificate was read again: %s", tls.certificate)
        return found

    # gRPC calls it at each handshake, in a thread of its own.
    return grpc.dynamic_ssl_server_credentials(
        configuration(), lambda: watch.take(read), require_client_authentication=tls.client_ca is not None
    )


def is_taken(pair: tuple[bytes, bytes]) -> bool:
    """Whether the library can serve a key with its certificate: it lacks kinds that Python's OpenSSL has, such as RSA-PSS.

    It says so of a port alone, so a server of nothing is given one that nobody can find.
    """
    server = grpc.server(ThreadPoolExecutor(1))
    try:
        server.add_secure_port(f"unix-abstract:{uuid4()}", grpc.ssl_server_credentials([pair]))
    except RuntimeError:
        return False
    finally:
        # What was never started keeps its port.
        server.start()
        server.stop(None).wait()
    return True
