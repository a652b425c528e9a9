"""One gRPC message as a stream of the request path: its body is there already, and its answer is a message.

Implements `request.context.Stream`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tilewire.service.errors import ClientGone
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.grpc.wire import Frame, pieces_of, varint
from tilewire.service.gateway.request.head import REQUEST_ID

# Tag of `infer_response` in a `ModelStreamInferResponse`.
_STREAMED = b"\x12"
# Lines of an answer's head that go to the client as trailing metadata.
_METADATA = frozenset({REQUEST_ID, "server-timing", "x-batch-size"})
# Copies of more than this take long enough for others to have a turn.
_LARGE_BYTES = 2**20


class RpcStream:
    """The stream of one request; see `context.Stream` for the calls. `is_streamed` for an answer that is one message of many.

    Attributes:
        frame: Parts of the message; None for calls other than infer.
        is_disconnected: The client cancelled the call, or its deadline passed.
        message: The answer; empty before it, and after an error.
    """

    __slots__ = (
        "_is_streamed",
        "_lines",
        "_on_gone",
        "client_flow",
        "frame",
        "is_complete",
        "is_disconnected",
        "message",
        "received_bytes",
    )
    # Whether a message arrives is the library's to know.
    is_cut = False

    def __init__(self, client_flow: Flow, *, is_streamed: bool = False) -> None:
        self.client_flow = client_flow
        self._is_streamed = is_streamed
        self._on_gone: Callable[[], None] | None = None
        self._lines = ""
        self.frame: Frame | None = None
        self.is_complete = True
        self.is_disconnected = False
        self.received_bytes = 0
        self.message = b""

    def receive_into(self, slot: memoryview, timeout_s: float) -> Awaitable[None] | None:
        """Copies the message into its slot: the only copy of the tensors."""
        frame, self.frame = self.frame, None
        assert frame is not None, "This is a bug: only infer has a body."
        if frame.nbytes > _LARGE_BYTES:
            return self._copy_by_turns(frame, slot)
        for place, part in frame.parts:
            slot[place : place + len(part)] = part
        self._check_connected()
        return None

    async def _copy_by_turns(self, frame: Frame, slot: memoryview) -> None:
        for place, piece in pieces_of(frame):
            slot[place : place + len(piece)] = piece
            await asyncio.sleep(0)
        self._check_connected()

    def _check_connected(self) -> None:
        if self.is_disconnected:
            raise ClientGone("the client left before its request was read")

    async def receive_piece(self, timeout_s: float) -> bytes:
        """Never called: the length is known."""
        raise AssertionError("This is a bug: a message has a length.")

    def watch(self, on_gone: Callable[[], None]) -> None:
        if self.is_disconnected:
            on_gone()
        else:
            self._on_gone = on_gone

    def unwatch(self) -> None:
        self._on_gone = None

    def leave(self) -> None:
        """Takes note that the client left."""
        self.is_disconnected = True
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def respond(self, status: int, lines: str, chunks: Sequence[bytes | memoryview], closes: bool) -> None:
        """Keeps the answer for the call; slots may be reused when this returns, so it is copied."""
        self._lines = lines
        if self._is_streamed:
            nbytes = sum(len(chunk) for chunk in chunks)
            chunks = (_STREAMED + varint(nbytes), *chunks)
        self.message = b"".join(chunks)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Fields of the answer's head besides its form, as trailing metadata."""
        pairs = (line.split(": ", 1) for line in self._lines.split("\r\n") if line)
        return tuple((name, value) for name, value in pairs if name in _METADATA)
