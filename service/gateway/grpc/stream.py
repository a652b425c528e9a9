"""One gRPC message as a stream of the request path: its body is there already, and its answer is a message.

Implements `request.context.Stream`; bounds the messages of one call that are under way.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from tilewire.service.errors import ClientGone
from tilewire.service.gateway.auth.flows import Flow
from tilewire.service.gateway.grpc.wire import Frame, pieces_of, varint
from tilewire.service.gateway.request.body import COPY_BYTES
from tilewire.service.gateway.request.head import REQUEST_ID

# Tag of `infer_response` in a `ModelStreamInferResponse`.
_STREAMED = b"\x12"
# Lines of an answer's head that go to the client as trailing metadata.
_METADATA = frozenset({REQUEST_ID, "server-timing", "x-batch-size"})
# Copies of more than this take long enough for others to have a turn.
_LARGE_BYTES = 2**20
_ERRORS = int(HTTPStatus.BAD_REQUEST)
# Requests of one stream that are under way at once; the next ones stay unread.
MAX_AHEAD = 16
# An answer that is smaller than those before lets the size that is expected fall by this part of it.
FADE = 8


class RpcStream:
    """The stream of one request; see `context.Stream` for the calls. `is_streamed` for an answer that is one message of many.

    Attributes:
        frame: Parts of the message; None for calls other than infer.
        is_disconnected: The client cancelled the call, or its deadline passed.
        is_cut: So it did before its answer was sent.
    """

    # A broken message is the library's to refuse, before there is a stream.
    refusal = None

    __slots__ = (
        "_answered",
        "_chunks",
        "_is_streamed",
        "_lines",
        "_on_gone",
        "_sent",
        "client_flow",
        "frame",
        "is_complete",
        "is_cut",
        "is_disconnected",
        "received_bytes",
    )

    def __init__(self, client_flow: Flow, *, is_streamed: bool = False) -> None:
        self.client_flow = client_flow
        self._is_streamed = is_streamed
        self._on_gone: Callable[[], object] | None = None
        self._lines = ""
        self._chunks: Sequence[bytes | memoryview] = ()
        # Futures that somebody waits for: until there is an answer, and until it was sent.
        self._answered: asyncio.Future[None] | None = None
        self._sent: asyncio.Future[None] | None = None
        self.frame: Frame | None = None
        self.is_complete = True
        self.is_cut = self.is_disconnected = False
        self.received_bytes = 0

    def receive_into(self, slot: memoryview, timeout_s: float) -> Awaitable[None] | None:
        """Copies the message into its slot: the only copy of the tensors."""
        frame, self.frame = self.frame, None
        assert frame is not None, "This is a bug: only infer has a body."
        if frame.nbytes > _LARGE_BYTES:
            return self._copy_by_turns(frame, slot)
        for place, part in frame.parts:
            slot[place : place + len(part)] = part
        self.check_connected()
        return None

    async def _copy_by_turns(self, frame: Frame, slot: memoryview) -> None:
        for place, piece in pieces_of(frame):
            slot[place : place + len(piece)] = piece
            await asyncio.sleep(0)
        self.check_connected()

    def check_connected(self) -> None:
        """Checks that somebody waits for the answer.

        Raises:
            ClientGone: The client left.
        """
        if self.is_disconnected:
            raise ClientGone("the client left before its request was read")

    async def receive_piece(self, timeout_s: float) -> bytes:
        """Never called: the length is known."""
        raise AssertionError("This is a bug: a message has a length.")

    def watch(self, on_gone: Callable[[], object]) -> None:
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
        self.is_cut = self._sent is not None
        self.end_sending()

    def respond(
        self, status: int, lines: str, chunks: Sequence[bytes | memoryview], closes: bool
    ) -> Awaitable[None] | None:
        """Keeps the answer for the call, and its slots, if any, until it was sent. An error has no message."""
        if self.is_disconnected:
            return None
        self._lines = lines
        if status >= _ERRORS:
            return None
        if self._is_streamed:
            nbytes = sum(len(chunk) for chunk in chunks)
            chunks = (_STREAMED + varint(nbytes), *chunks)
        self._chunks = chunks
        if not any(isinstance(chunk, memoryview) for chunk in chunks):
            return None
        self._sent = asyncio.get_running_loop().create_future()
        self.end_waiting()
        return self._sent

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer to be sent."""
        return self._sent is not None

    def answered(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Returns what ends when there is an answer, or with `end_waiting`."""
        self._answered = loop.create_future()
        return self._answered

    def end_waiting(self) -> None:
        """Wakes the call that waits for the answer, if any."""
        answered, self._answered = self._answered, None
        if answered is not None and not answered.done():
            answered.set_result(None)

    async def take_message(self) -> bytes:
        """Copies the answer out of its slots, for the library to send; others have their turn between pieces of a large one."""
        chunks, self._chunks = self._chunks, ()
        if sum(len(chunk) for chunk in chunks) <= _LARGE_BYTES:
            return b"".join(chunks)
        message = io.BytesIO()
        for chunk in chunks:
            for at in range(0, len(chunk), COPY_BYTES):
                message.write(chunk[at : at + COPY_BYTES])
                await asyncio.sleep(0)
        # Not copied once more: it is what was written to.
        return message.getvalue()

    def end_sending(self, _call: object = None) -> None:
        """Gives the slots up: the library has sent the answer, or the client left."""
        sent, self._sent, self._chunks = self._sent, None, ()
        if sent is not None and not sent.done():
            sent.set_result(None)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Fields of the answer's head besides its form, as trailing metadata."""
        pairs = (line.split(": ", 1) for line in self._lines.split("\r\n") if line)
        return tuple((name, value) for name, value in pairs if name in _METADATA)


class Window:
    """Places for the requests of a stream, each from before it is read until its answer was sent.

    Slots of answers are held until the client reads, so answers of `max_bytes` together may be ahead of it. The size of the
    next is expected to be that of those before; until the first is known, one request is under way.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._expected_bytes = 0
        self._num = 0
        self._limit = 1
        self._freed = asyncio.Event()

    async def enter(self) -> None:
        """Waits for a place, and takes it."""
        while self._num >= self._limit:
            self._freed.clear()
            await self._freed.wait()
        self._num += 1

    def note(self, nbytes: int) -> None:
        """Takes note of an answer's size; more requests may have places then, or fewer."""
        expected_bytes = self._expected_bytes
        self._expected_bytes = max(nbytes, expected_bytes - expected_bytes // FADE, 1)
        self._limit = min(MAX_AHEAD, max(1, self._max_bytes // self._expected_bytes))
        self._freed.set()

    def leave(self) -> None:
        """Gives a place back."""
        self._num -= 1
        self._freed.set()
