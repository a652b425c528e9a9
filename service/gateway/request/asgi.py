"""One request's stream over ASGI: for servers other than ours, and for calls that a framework's router has found."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from starlette.types import Message, Receive, Scope, Send

from tilewire.service.errors import ClientGone, InvalidRequest
from tilewire.service.gateway.auth.flows import flow_of_address
from tilewire.service.gateway.request.adapter import Api
from tilewire.service.gateway.request.body import LINGER_S, stalled
from tilewire.service.gateway.request.context import STREAM, Gateway, RequestContext, Stream
from tilewire.service.gateway.request.handle import handle
from tilewire.service.gateway.request.head import read_head
from tilewire.service.ops.op import AnyOp


class AsgiStream:
    """The stream of one request under any ASGI server; see `context.Stream` for its calls and attributes."""

    # ASGI does not tell what has left.
    is_cut = False
    refusal = None

    def __init__(self, receive: Receive, send: Send, host: str = "") -> None:
        self.client_flow = flow_of_address(host)
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self._on_gone: Callable[[], object] | None = None
        self.is_complete = False
        self.is_disconnected = False
        self.received_bytes = 0

    async def receive(self) -> Message:
        """The next message, as `receive` gives it."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_disconnected = True
        else:
            self.received_bytes += len(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)
        return message

    async def receive_into(self, slot: memoryview, timeout_s: float) -> None:
        received = 0
        while not self.is_complete:
            piece = await self.receive_piece(timeout_s)
            if self.is_disconnected:
                raise ClientGone(f"the client left after {received} bytes of its body")
            end = received + len(piece)
            if end > len(slot):
                raise InvalidRequest(f"body: more than the {len(slot)} bytes that Content-Length said")
            slot[received:end] = piece
            received = end
        if received != len(slot):
            raise InvalidRequest(f"body: {received} bytes came; Content-Length said {len(slot)}")

    async def receive_piece(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                piece: bytes = (await self.receive()).get("body", b"")
        except TimeoutError:
            raise InvalidRequest(stalled(timeout_s, self.received_bytes)) from None
        return piece

    def watch(self, on_gone: Callable[[], object]) -> None:
        self._on_gone = on_gone
        self._watcher = asyncio.ensure_future(self._receive_until_gone())

    def unwatch(self) -> None:
        self._on_gone = None
        if self._watcher is not None:
            self._watcher.cancel()

    async def _receive_until_gone(self) -> None:
        while not self.is_disconnected:
            await self.receive()
        if self._on_gone is not None:
            self._on_gone()

    async def respond(self, status: int, lines: str, chunks: Sequence[bytes | memoryview], closes: bool) -> None:
        """Sends a whole answer. Slots may be reused when this returns, so the body is copied."""
        pairs = [line.split(": ", 1) for line in lines.split("\r\n") if line]
        headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in pairs]
        if closes:
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        lingers = closes and not (self.is_complete or self.is_disconnected)
        await self._send({"type": "http.response.body", "body": b"".join(chunks), "more_body": lingers})
        if lingers:
            await self._discard()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not (self.is_complete or self.is_disconnected):
                    await self.receive()


def open_context(scope: Scope, receive: Receive, send: Send) -> RequestContext:
    """The context of a request that came over ASGI: by our own server's stream, or by one over ASGI."""
    stream: Stream | None = scope.get("extensions", {}).get(STREAM)
    if stream is None:
        host, _port = scope.get("client") or ("", 0)
        stream = AsgiStream(receive, send, host)
    head, own = read_head(scope["method"], scope["path"], scope["query_string"], scope["headers"])
    return RequestContext(head, own, stream)


async def run_op(gateway: Gateway, target: tuple[Api, AnyOp], scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request of an op that came over ASGI: the entry for servers that are not ours."""
    work = handle(gateway, open_context(scope, receive, send), *target)
    if work is not None:
        await work
