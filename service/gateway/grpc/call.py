"""One gRPC call before its messages: whose it is, what it may do, and how it ends. Runs in the gateway's event loop."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from urllib.parse import unquote

import grpc

from tilewire.service.gateway.auth.authenticator import Access
from tilewire.service.gateway.auth.flows import MAX_ADDRESSES, Flow, flow_of_address
from tilewire.service.gateway.grpc.status import code_of, hints_of
from tilewire.service.gateway.grpc.stream import RpcStream
from tilewire.service.gateway.request.context import Gateway, RequestContext
from tilewire.service.gateway.request.head import IDENTITIES, OWN_HEADERS, Head

_KNOWN = OWN_HEADERS.union(IDENTITIES)
_NOTHING: Mapping[str, str] = {}
# Longest deadline, in seconds. `grpc-timeout` can name 11,000 years, which are no nanoseconds of 64 bits.
FOREVER_S = 1e8


class Servicer(Protocol):
    """gRPC's side of a call, as far as it is used here: `grpc.aio.ServicerContext` has it."""

    def peer(self) -> str: ...
    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...
    def time_remaining(self) -> float | None: ...
    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None: ...
    async def read(self) -> bytes: ...
    async def write(self, message: bytes) -> None: ...
    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: Sequence[tuple[str, str]] = ()
    ) -> None: ...


class RpcCall:
    """Metadata and deadline of one call.

    Attributes:
        path: Path of the method.
        access: Holder of the key and its rights; None until they are known.
        began_s: When it came, on the performance counter.
        deadline_s: When the client gives up, on the performance counter; 0 for never.
        own: Values that are each request's own.
        identity: Values that identify the caller.
        repeated: Names of values that came more than once.
        client_flow: Flow of the client's address.
    """

    __slots__ = ("access", "began_s", "client_flow", "deadline_s", "identity", "own", "path", "repeated")

    def __init__(self, path: str, call: Servicer) -> None:
        self.path = path
        self.access: Access | None = None
        self.client_flow = flow_of_peer(call.peer())
        self.began_s = time.perf_counter()
        left_s = call.time_remaining()
        self.deadline_s = 0.0 if left_s is None or left_s > FOREVER_S else self.began_s + left_s
        self.own = self.identity = _NOTHING
        self.repeated: frozenset[str] = frozenset()
        self._read(call.invocation_metadata() or ())

    def _read(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        for name, value in metadata:
            if name not in _KNOWN or not isinstance(value, str):
                continue
            if name in OWN_HEADERS:
                self.own = {**self.own, name: value}
            else:
                if name in self.identity:
                    self.repeated |= {name}
                self.identity = {**self.identity, name: value}

    def check(self, gateway: Gateway) -> None:
        """Refuses a call before its message is read.

        Raises:
            InvalidRequest: It has two keys.
            Unauthorized: Its key is missing or unknown.
            Unavailable: The gateway drains.
            TooBusy: Too many requests are under way.
        """
        if self.repeated:
            self.head(0).check()
        self.access = access = gateway.authenticator.identify(self.path, self.identity)
        admission = gateway.admission
        # A nearly full gateway is shared when the request is admitted.
        if admission.is_draining or admission.in_flight >= gateway.settings.max_in_flight:
            admission.admit(access.flow or self.client_flow).release()

    def head(self, nbytes: int) -> Head:
        """The head that a request of this call has whose slot has `nbytes`."""
        return Head("POST", self.path, b"", self.identity, self.repeated, nbytes, is_chunked=False)

    def context(self, head: Head, stream: RpcStream) -> RequestContext:
        """Makes the context of a request of this call."""
        context = RequestContext(head, self.own, stream)
        context.began_s, context.deadline_s = self.began_s, self.deadline_s
        context.route = self.path
        # Metadata cost more than the rest of an answer's head: they go to those who name their requests.
        context.has_lines = bool(self.own)
        return context


@functools.lru_cache(MAX_ADDRESSES)
def flow_of_peer(peer: str) -> Flow:
    """Returns the flow of a client by gRPC's name of it: `ipv4:127.0.0.1:4711`, `ipv6:%5B::1%5D:4711` or `unix:`."""
    kind, _, rest = peer.partition(":")
    return flow_of_address(unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else "")


async def finish(call: Servicer, context: RequestContext, stream: RpcStream) -> bytes:
    """Returns the message of a call, or ends it with the status of its error.

    An error is aborted, so that no message and no other headers come before its status: clients try such calls again only.
    """
    error = context.error
    if error is None:
        if context.has_lines:
            call.set_trailing_metadata(stream.metadata)
        return await stream.take_message()
    await call.abort(code_of(error, is_timed=context.is_timed), error.detail, (*stream.metadata, *hints_of(error)))
    raise AssertionError("This is a bug: an aborted call goes on.")
