"""The parts of a gateway, and the state of one request. Value objects and Protocols; they start nothing."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from starlette.types import Scope

from tilewire.service.config.process import GatewaySettings
from tilewire.service.errors import TilewireError
from tilewire.service.gateway.auth.authenticator import Access, Authenticator
from tilewire.service.gateway.auth.flows import NO_FLOW, Flow
from tilewire.service.gateway.auth.origins import Origins
from tilewire.service.gateway.engines.caller import Departure
from tilewire.service.gateway.engines.router import Engines
from tilewire.service.gateway.request.admission import Admission
from tilewire.service.gateway.request.head import TRACE_PARENT, TRACE_STATE, Head, HeadKey, request_id_of
from tilewire.service.gateway.request.programs import Programs
from tilewire.service.gateway.request.template import CachedHead, TemplateCache
from tilewire.service.gateway.telemetry.metrics import GatewayMetrics
from tilewire.service.gateway.telemetry.tracing import TraceParent, parse_traceparent
from tilewire.service.ipc.arena import Arena
from tilewire.service.ipc.messages import Timings

if TYPE_CHECKING:
    from tilewire.service.gateway.telemetry.otlp import OtlpRecorder

# Key of our own protocol's stream in a scope's extensions; absent under another server.
STREAM = "tilewire.stream"
# Ids of requests without one. They begin at random, so that no two processes have the same, and count: no system call.
_OWN_IDS = itertools.count(int.from_bytes(os.urandom(16)) >> 1)


@dataclass(frozen=True)
class Gateway:
    """The parts of one gateway; without tracing there is no recorder, and without `--allow-origin` there are no origins."""

    settings: GatewaySettings
    version: str
    engines: Engines
    arena: Arena
    admission: Admission
    metrics: GatewayMetrics
    authenticator: Authenticator = field(default_factory=Authenticator)
    recorder: OtlpRecorder | None = None
    templates: TemplateCache = field(default_factory=TemplateCache)
    programs: Programs = field(init=False)
    origins: Origins | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "programs", Programs(self.engines, self.settings.limits))
        self.metrics.follow_load(self.admission, self.arena)
        allowed = self.settings.allow_origin
        object.__setattr__(self, "origins", Origins(allowed) if allowed else None)


class Stream(Departure, Protocol):
    """One request's side of its connection: the body comes in by it, and the answer leaves by it.

    Implemented by our own HTTP/1.1 connections, and over ASGI for other servers.

    Attributes:
        is_complete: The last byte of the body is in.
        received_bytes: Bytes of the body that were received, also when it broke off.
        client_flow: Flow of the client's address.
        is_cut: The client left before all of its answer had, as far as the server can tell.
        refusal: What the connection answered by itself, since the body broke the protocol; None for nothing.
    """

    @property
    def refusal(self) -> RequestContext | None: ...

    @property
    def is_cut(self) -> bool: ...
    @property
    def client_flow(self) -> Flow: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def received_bytes(self) -> int: ...

    def receive_into(self, slot: memoryview, timeout_s: float) -> Awaitable[None] | None:
        """Receives a body of declared length into a slot of exactly that length.

        Returns:
            None when all of it was here; else what ends with the body.

        Raises:
            ClientGone: The client left first.
            InvalidRequest: It sent no byte for `timeout_s`, or another number of bytes.
        """
        ...

    async def receive_piece(self, timeout_s: float) -> bytes:
        """Receives what has come of a chunked body, at least one byte unless it is complete or the client has left.

        Raises:
            InvalidRequest: No byte came for `timeout_s`.
        """
        ...

    def respond(
        self, status: int, lines: str, chunks: Sequence[bytes | memoryview], closes: bool
    ) -> Awaitable[None] | None:
        """Writes a whole answer.

        Args:
            status: HTTP status.
            lines: Header lines, each with its line end.
            chunks: The body.
            closes: The connection ends behind it; what still comes of the body is discarded for a moment.

        Returns:
            None when no chunk is needed any more; else what ends then.
        """
        ...


class RequestContext:
    """One request and what becomes of it.

    Attributes:
        request_id: The client's id, or ours.
        trace: Caller's span, or None.
        key: Key of its head, where the head may be cached.
        cached: Cached head, or None.
        began_s: When its headers were in, on the performance counter.
        route: Pattern of its path, for spans; empty when there is none.
        op: Name of the op, or None.
        model: Name of the kept program; empty for an op, and before it is found.
        status: Status of the answer; None before it begins.
        receive_began_s: Start of the reception of its body, on the performance counter; 0 before that.
        receive_s: Seconds in which its body came and was read.
        timings: Stages in the engine, once it is computed.
        batch_size: Number of requests that shared its launch; 0 when it was not computed.
        send_s: Seconds in which its answer left.
        sent_bytes: Bytes of the answer's body.
        failure: Code of the error that it was answered with; empty without one.
        allow: Methods that the path offers, when this one is not among them.
        access: Holder of the key and its rights; None until it is known.
        flow: Sender with whom it shares; known as soon as `access` is.
        charged_bytes: Bytes of body and answer that the key's quota counts so far; None when it was refused at once.
        deadline_s: When the client gives up, on the performance counter; 0 for never.
        is_timed: Its own timeout ends before the client gives up.
        has_lines: Header lines of a result reach the client.
        error: Error that it was answered with; None before, and for a result.
    """

    # Defaults stand in the class: an assignment of each would be a part of what every request costs.
    trace: TraceParent | None = None
    key: HeadKey | None = None
    cached: CachedHead | None = None
    op: str | None = None
    status: int | None = None
    timings: Timings | None = None
    access: Access | None = None
    charged_bytes: int | None = None
    error: TilewireError | None = None
    has_lines, is_timed = True, False
    model = route = failure = allow = ""
    receive_began_s = receive_s = send_s = deadline_s = 0.0
    batch_size = sent_bytes = 0
    flow = NO_FLOW

    def __init__(self, head: Head, own: Mapping[str, str], stream: Stream) -> None:
        self.head = head
        self.own = own
        self.stream = stream
        self.began_s = time.perf_counter()
        if own and TRACE_PARENT in own:
            self.trace = parse_traceparent(own[TRACE_PARENT], own.get(TRACE_STATE, ""))
        self.request_id = (request_id_of(own) if own else None) or f"{next(_OWN_IDS):032x}"

    @property
    def received_bytes(self) -> int:
        """Bytes of the body that have come."""
        return self.stream.received_bytes

    @property
    def granted(self) -> Access:
        """Rights of the caller, once the key was checked."""
        assert self.access is not None, "This is a bug."
        return self.access


def context_of(scope: Scope) -> RequestContext:
    """The context that the middleware put into a scope."""
    context = scope["state"]["context"]
    assert isinstance(context, RequestContext), "This is a bug."
    return context
