"""A gateway's gRPC server in this process, with an engine of ours at the Protocol. Owns its life; knows no test."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc

from tests.support.gateway_bench import GatewayBench
from tilewire.service.gateway.auth.authenticator import Authenticator
from tilewire.service.gateway.grpc.server import GrpcServer

INSTANCE = ("grpc.use_local_subchannel_pool", 1)


def scene(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an asynchronous test in a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class RpcBench(GatewayBench):
    """A gateway and its parts; see `GatewayBench`."""

    def __init__(self, authenticator: Authenticator | None = None, **settings: Any) -> None:
        super().__init__(authenticator, grpc_address="127.0.0.1:0", **settings)
        self.rpc = GrpcServer(self.gateway)

    @contextlib.asynccontextmanager
    async def answering(self, *options: tuple[str, object]) -> AsyncIterator[grpc.aio.Channel]:
        """Serves; at the end nothing is under way, and no slot is held."""
        task = asyncio.create_task(self.rpc.serve())
        await self.rpc.is_listening.wait()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{self.rpc.port}", options=[INSTANCE, *options]) as channel:
                yield channel
        finally:
            self.rpc.close()
            await asyncio.wait_for(task, 10)
        assert self.arena.used_bytes == 0
        assert self.admission.in_flight == 0
