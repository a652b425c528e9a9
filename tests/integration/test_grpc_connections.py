"""Connections of the gRPC port: how many there may be, and which are closed. A gateway's gRPC server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import AsyncIterator

import grpc
import pytest

from tests.support.rpc_bench import RpcBench, scene
from tilewire.service.gateway.grpc import open_inference_pb2 as pb
from tilewire.service.gateway.grpc.paths import SERVICE, STREAM_INFER

# Longer than every time that these tests set, and shorter than the library's own.
CLOSED_S = 8.0
SETTINGS_FRAME, HEADERS_FRAME, END_HEADERS = 4, 1, 4
HELD_S = 0.3


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


# What a client sends first.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS_FRAME, 0, 0)


def call(path: str) -> bytes:
    """Begins a call without a message."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "here", "te": "trailers"}
    block = b""
    for name, value in {**fields, "content-type": "application/grpc"}.items():
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return frame(HEADERS_FRAME, END_HEADERS, 1, block)


@contextlib.asynccontextmanager
async def connection(bench: RpcBench, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that sends nothing more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.rpc.port)
    writer.write(sent)
    try:
        yield reader
    finally:
        writer.close()


async def is_closed(reader: asyncio.StreamReader, within_s: float) -> bool:
    """Whether the server closes a connection by then."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(within_s):
            while await reader.read(2**16):
                pass
    return reader.at_eof() or reader.exception() is not None


async def is_live(channel: grpc.aio.Channel) -> bool:
    answer = await channel.unary_unary(f"/{SERVICE}/ServerLive")(b"", wait_for_ready=True, timeout=CLOSED_S)
    return bool(pb.ServerLiveResponse.FromString(answer).live)


@pytest.mark.parametrize("sent", [b"", PREFACE[:10]])
@scene
async def test_a_connection_that_does_not_begin_is_closed(sent: bytes) -> None:
    bench = RpcBench(body_timeout_s=HELD_S)
    async with bench.answering(), connection(bench, sent) as reader:
        assert await is_closed(reader, CLOSED_S)


@scene
async def test_a_client_that_vanished_during_a_call_is_noticed() -> None:
    """It answers no ping; its requests would hold their slots for ever."""
    bench = RpcBench(body_timeout_s=HELD_S)
    async with bench.answering(), connection(bench, PREFACE + call(STREAM_INFER)) as reader:
        assert await is_closed(reader, CLOSED_S)


@scene
async def test_an_idle_connection_is_closed_and_its_client_comes_back() -> None:
    async with RpcBench(keep_alive_s=HELD_S).answering() as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        await watch.read()
        await asyncio.sleep(4 * HELD_S)
        # One with a call is not idle.
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        watch.cancel()
        await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), CLOSED_S)
        assert await is_live(channel)


@scene
async def test_connections_beyond_the_limit_are_closed_at_once() -> None:
    bench = RpcBench(max_connections=3)
    async with bench.answering() as channel, contextlib.AsyncExitStack() as stack:
        async with contextlib.AsyncExitStack() as first:
            for _ in range(3):
                reader = await first.enter_async_context(connection(bench, PREFACE))
                assert await reader.read(1)
            refused = await stack.enter_async_context(connection(bench, PREFACE))
            assert await is_closed(refused, CLOSED_S)
        # Those that left make room.
        assert await is_live(channel)


@scene
async def test_times_without_a_bound() -> None:
    async with RpcBench(keep_alive_s=math.inf, body_timeout_s=math.inf).answering() as channel:
        assert await is_live(channel)
