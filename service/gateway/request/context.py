"""What every route of a gateway may use, and what is known of one request. Value objects; they start nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from starlette.types import Message, Receive, Scope

from tilewire.service.config.process import GatewaySettings
from tilewire.service.gateway.auth.authenticator import Access, Doorman
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.telemetry.metrics import GatewayMetrics
from tilewire.service.gateway.telemetry.tracing import Recorder, TraceParent
from tilewire.service.ipc.arena import Arena
from tilewire.service.ipc.messages import Timings

if TYPE_CHECKING:
    from tilewire.service.gateway.request.habits import Habit


@dataclass(frozen=True)
class Gateway:
    """The parts of one gateway.

    Attributes:
        settings: Its slice of the settings.
        version: Of Tilewire.
        engines: What computes.
        arena: Memory for bodies and results.
        admission: The door.
        metrics: What is counted.
        doorman: Tells who asks.
        recorder: Takes spans, or None.
    """

    settings: GatewaySettings
    version: str
    engines: Engines
    arena: Arena
    admission: Admission
    metrics: GatewayMetrics
    doorman: Doorman = field(default_factory=Doorman)
    recorder: Recorder | None = None


# Where our own protocol puts itself in a scope's extensions; absent under another server.
CONNECTION = "tilewire.connection"


class Connection(Protocol):
    """What our own protocol offers beyond ASGI."""

    @property
    def repeated_head(self) -> bytes:
        """Request line and headers, when one of the last requests had the same but for its own values; else nothing."""
        ...

    def remember(self, habit: Habit) -> None:
        """From now on, answers such requests on the lane."""
        ...

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` once if the client leaves before `unwatch`; at once if it has left."""
        ...

    def unwatch(self) -> None:
        """Ends the watch."""
        ...

    @property
    def can_receive_into(self) -> bool:
        """Whether this connection's bytes can go straight into a slot."""
        ...

    @property
    def received_bytes(self) -> int:
        """Bytes of the body that `receive_into` received, also when it failed."""
        ...

    async def receive_into(self, slot: memoryview, timeout_s: float) -> None:
        """Receives the rest of the body into a slot of exactly the declared length.

        Raises:
            ClientGone: The client left first.
            InvalidRequest: It brought no byte for `timeout_s`.
        """
        ...

    def pieces(self, chunk: bytes | memoryview) -> Iterable[bytes | memoryview]:
        """Cuts a chunk of an answer into what may be written at once."""
        ...

    async def flushed(self) -> None:
        """Returns when everything that was written has left, or the client has."""
        ...


class Incoming:
    """The rest of a request's body, as ASGI hands it over.

    Args:
        receive: ASGI's.
        connection: Under our own server.

    Attributes:
        is_complete: The last byte was read.
        is_disconnected: The client left.
        was_read: Reading has begun; a waiting client was told to continue.
        connection: Under our own server, else None.
    """

    def __init__(self, receive: Receive, connection: Connection | None = None) -> None:
        self._receive = receive
        self.connection = connection
        self._watcher: asyncio.Task[None] | None = None
        self._on_gone: Callable[[], None] | None = None
        self.is_complete = False
        self.is_disconnected = False
        self.was_read = False

    async def __call__(self) -> Message:
        """The next message, as `receive` gives it."""
        self.was_read = True
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_disconnected = True
        elif not message.get("more_body", False):
            self.is_complete = True
        return message

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` once if the client leaves before `unwatch`; for after the body is complete."""
        self._on_gone = on_gone
        if self.connection is not None:
            self.connection.watch(self._left)
        else:
            self._watcher = asyncio.ensure_future(self._receive_until_gone())

    def unwatch(self) -> None:
        """Ends the watch."""
        self._on_gone = None
        if self.connection is not None:
            self.connection.unwatch()
        elif self._watcher is not None:
            self._watcher.cancel()

    def _left(self) -> None:
        self.is_disconnected = True
        if self._on_gone is not None:
            self._on_gone()

    async def _receive_until_gone(self) -> None:
        while not self.is_disconnected:
            await self()
        self._left()


@dataclass(slots=True)
class Exchange:
    """One request and what becomes of it; the middleware makes it and keeps it in the scope's state.

    Attributes:
        request_id: The client's, or ours.
        incoming: Its body.
        headers: Its headers.
        began_s: When its headers were in, on the performance counter.
        op: The op that was asked for, or None.
        received_bytes: Of the body.
        receive_s: How long its body took to come, and its header to be read.
        timings: Where its time in the engine went, once it is computed.
        sent_bytes: Of the answer's body.
        allow: Methods that the path offers, when this one is not among them.
        access: Who asks, and what they may do; None until it is known.
        charged_bytes: Of body and answer, those that the key's quota counts so far; None when it was refused at the door.
        trace: What the caller's `traceparent` said, or None.
        receive_began_s: When its body was asked for, on the performance counter; 0 when it was not.
        batch_size: How many requests shared its launch; 0 when it was not computed.
        send_s: How long its tensor took to leave.
        body_format: Of its body, once it is read: the codec's name.
        body_offset: Of its body in the segment, once it is read.
    """

    request_id: str
    incoming: Incoming
    headers: Mapping[str, str]
    began_s: float = field(default_factory=time.perf_counter)
    op: str | None = None
    received_bytes: int = 0
    receive_s: float = 0.0
    timings: Timings | None = None
    sent_bytes: int = 0
    allow: str = ""
    access: Access | None = None
    charged_bytes: int | None = None
    trace: TraceParent | None = None
    receive_began_s: float = 0.0
    batch_size: int = 0
    send_s: float = 0.0
    body_format: str = ""
    body_offset: int = 0

    @property
    def granted(self) -> Access:
        """Who asks, for whatever comes after the door."""
        assert self.access is not None, "This is a bug."
        return self.access

    @property
    def content_length(self) -> int | None:
        """The declared length of the body, or None when it is not declared."""
        declared = self.headers.get("content-length")
        return int(declared) if declared is not None else None

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks."""
        return "chunked" in self.headers.get("transfer-encoding", "").lower()


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that the middleware put into the scope."""
    exchange = scope["state"]["exchange"]
    assert isinstance(exchange, Exchange), "This is a bug."
    return exchange


def forget(scope: Scope) -> None:
    """Takes out of the scope of a request that has ended what leads back to it.

    Without cycles everything of a request is freed at once. What the garbage collector has to find, it finds for hundreds
    of requests together, while others wait.
    """
    scope["state"].pop("exchange", None)
    scope.get("extensions", {}).pop(CONNECTION, None)


def headers_of(scope: Scope) -> dict[str, str]:
    """The request's headers by lower-case name; of a repeated one, the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def connection_of(scope: Scope) -> Connection | None:
    """Our own protocol's side of this request, or None under another server."""
    connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
    return connection
