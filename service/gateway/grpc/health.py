"""Answers `grpc.health.v1.Health`. Runs in the gateway's event loop.

The library's servicer is not used: when one watcher leaves, it forgets the others of the same name.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from tilewire.service.errors import TilewireError
from tilewire.service.gateway.grpc.call import Servicer
from tilewire.service.gateway.grpc.models import read_request
from tilewire.service.gateway.grpc.paths import SERVICE
from tilewire.service.gateway.grpc.status import code_of

# The whole server, and its service: both have the same status.
NAMES = ("", SERVICE)


class HealthCalls:
    """The calls by the names of their methods, and the status that they answer."""

    def __init__(self) -> None:
        self._status = HealthCheckResponse.NOT_SERVING
        # Of the next change; each change has its own.
        self._changed = asyncio.Event()
        self.handlers: dict[str, grpc.RpcMethodHandler] = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    def set(self, *, is_ready: bool) -> None:
        """Sets the status, and sends it to all watchers."""
        self._status = HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, message: bytes, call: Servicer) -> bytes:
        name = await _name_of(message, call)
        if name not in NAMES:
            await call.abort(grpc.StatusCode.NOT_FOUND, f"service: there is no {name[:64]!r}")
        return _written(self._status)

    async def _watch(self, message: bytes, call: Servicer) -> None:
        name = await _name_of(message, call)
        sent = None
        while True:
            changed = self._changed
            status = self._status if name in NAMES else HealthCheckResponse.SERVICE_UNKNOWN
            if status != sent:
                await call.write(_written(status))
                sent = status
            await changed.wait()


async def _name_of(message: bytes, call: Servicer) -> str:
    """Reads the name of the service, or ends the call."""
    try:
        name: str = read_request(HealthCheckRequest, message).service
    except TilewireError as error:
        await call.abort(code_of(error), error.detail)
        raise
    return name


def _written(status: HealthCheckResponse.ServingStatus) -> bytes:
    message: bytes = HealthCheckResponse(status=status).SerializeToString()
    return message
