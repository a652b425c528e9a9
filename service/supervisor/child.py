"""A child's end of its control link: settings, `Ready`, figures for `/metrics`, `Drain`.

A child's standard input is a socket to the supervisor. The first frame on it is the child's settings, and then come the
descriptors in them. So a process may be started before its purpose is decided. After that the child sends `Ready` and
its figures, and reads the sums of all; the supervisor sends `Drain`. End of file means that the supervisor is gone, and
is a `Drain` too: no child outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from tilewire.service.config.process import EngineSettings, GatewaySettings
from tilewire.service.errors import Unavailable
from tilewire.service.ipc.link import Link
from tilewire.service.ipc.messages import LENGTH_BYTES
from tilewire.service.telemetry.counters import Figures, Sample
from tilewire.service.telemetry.history import HistoryReport

SettingsT = TypeVar("SettingsT", GatewaySettings, EngineSettings)
ContentT = TypeVar("ContentT")

CONTROL_FD = 0
# Objects are looked through as soon as 2,000 more live than died, which takes well under a millisecond. Survivors are
# looked through once more after five such looks, and everything practically never.
GC_THRESHOLDS = (2_000, 5, 1_000)

# `sysexits.h` calls it EX_CONFIG: starting again would fail again, so the supervisor gives up.
EXIT_CANNOT_START = 78

# Figures wait in the child while so many bytes have not left.
MAX_UNSENT_BYTES = 2**20

# Longest life of a child whose supervisor is gone. An engine lets go of 4 GiB of pinned memory in a second.
ORPHAN_S = 30.0
EXIT_ORPHAN = 75

# Time between two beats, in seconds.
BEAT_S = 0.5

# The kernel takes 253 descriptors in one message.
FDS_AT_ONCE = 250


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what is under way, then exit with status 0."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The child does its work from now on.

    Attributes:
        detail: For the log: the device, or the listening address.
    """

    detail: str = ""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The child is alive; sent every `BEAT_S`. The first one begins the watch over a child."""


Readable = Literal["text", "openmetrics", "hidden", "history"]


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Requests what the supervisor has of all processes.

    Attributes:
        what: The text of `/metrics` in either form, the sums that it does not show, or the last minutes.
        key: Name of the key whose failures are wanted with the last minutes; None for those of everybody.
        models: Names of the ops and kept programs whose sums are wanted that `/metrics` does not show.
    """

    id: int
    what: Readable
    key: str | None = None
    models: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Reply to `Read`; its content is MessagePack."""

    id: int
    content: bytes


ToSupervisor = Ready | Beat | Figures | Read
ToChild = Drain | Reply


def send_settings(control: socket.socket, settings: GatewaySettings | EngineSettings) -> None:
    """Sends a child its settings and the descriptors in them; blocks until it reads.

    Raises:
        OSError: The child is gone.
    """
    fds = settings.fds
    frame = msgspec.msgpack.encode((settings, fds))
    control.sendall(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
    for begin in range(0, len(fds), FDS_AT_ONCE):
        socket.send_fds(control, [b"\0"], fds[begin : begin + FDS_AT_ONCE])


def build_struct_types() -> None:
    """Has msgspec build what it keeps for each `Struct`, while the process has one thread.

    It does so at a type's first use, and runs Python meanwhile. Another thread that uses the type then reads a null pointer
    (0.22.0): engines that started beside gateways died so.
    """
    kinds: list[type[msgspec.Struct]] = [msgspec.Struct]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        # The type of a field that cannot be decoded: nobody decodes it.
        with contextlib.suppress(TypeError):
            msgspec.msgpack.Decoder(kind)


def read_settings(kind: type[SettingsT]) -> SettingsT:
    """Blocks until the supervisor has sent this child's settings; a spare process waits here.

    To be called with everything imported, and before there are threads.

    Raises:
        EOFError: The supervisor went away first.
        msgspec.ValidationError: It sent something else.
    """
    build_struct_types()
    with socket.socket(fileno=socket.dup(CONTROL_FD)) as control:
        length = int.from_bytes(_read_exactly(control, LENGTH_BYTES), "little")
        frame: tuple[SettingsT, list[int]] = msgspec.msgpack.decode(
            _read_exactly(control, length),
            type=tuple[kind, list[int]],  # type: ignore[valid-type]
        )
        settings, numbers = frame
        fds: list[int] = []
        while len(fds) < len(numbers):
            data, more, _flags, _address = socket.recv_fds(control, 1, FDS_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise EOFError("the supervisor went away")
            fds += more
    return settings.moved({-1: -1, **dict(zip(numbers, fds, strict=True))})


def freeze_objects() -> None:
    """Freezes all objects that live now, over which the garbage collector would take up to 0.1 s.

    Objects made while serving are freed by their last reference. The collector looks for cycles in few objects at a
    time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


class Control:
    """The control link of this process; see `gateway.telemetry.metrics.Totals` for what it reads.

    Args:
        on_drain: Called on `Drain` and when the supervisor is gone; may be called twice.
        orphan_s: How long the process may take to end then.
    """

    def __init__(self, on_drain: Callable[[], None], orphan_s: float = ORPHAN_S) -> None:
        self._on_drain = on_drain
        self._orphan_s = orphan_s
        self._link: Link[ToChild] = Link(ToChild, self._on_message, self._on_lost)
        self._lost = asyncio.Event()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[bytes]] = {}

    @classmethod
    async def open(cls, on_drain: Callable[[], None], orphan_s: float = ORPHAN_S) -> Control:
        """Opens the control link; see the constructor."""
        control = cls(on_drain, orphan_s)
        sock = socket.socket(fileno=socket.dup(CONTROL_FD))
        sock.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: control._link, sock)
        return control

    @property
    def is_lost(self) -> bool:
        """Whether the supervisor is gone."""
        return self._lost.is_set()

    @property
    def is_congested(self) -> bool:
        return self._link.unsent_bytes > MAX_UNSENT_BYTES

    def send(self, message: Ready | Beat | Figures) -> None:
        """Sends with everything else that this turn of the loop sends."""
        self._link.send(message)

    async def beat(self, is_well: Callable[[], bool] = lambda: True) -> None:
        """Sends beats for as long as the child is well; to be run in the loop that does its work."""
        while True:
            if is_well():
                self.send(Beat())
            await asyncio.sleep(BEAT_S)

    async def exposition(self, *, openmetrics: bool) -> tuple[bytes, str]:
        return await self._read("openmetrics" if openmetrics else "text", tuple[bytes, str])

    async def hidden(self, models: Sequence[str]) -> list[Sample]:
        return await self._read("hidden", list[Sample], models=tuple(models))

    async def history(self, key: str | None) -> HistoryReport:
        return await self._read("history", HistoryReport, key=key)

    async def close(self) -> None:
        """Closes the link after everything that was sent has left."""
        self._link.close()
        await self._lost.wait()

    async def _read(
        self, what: Readable, kind: type[ContentT], key: str | None = None, models: tuple[str, ...] = ()
    ) -> ContentT:
        if not self._link.is_open:
            raise Unavailable("the supervisor is gone")
        number = next(self._ids)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        self._link.send(Read(number, what, key, models))
        try:
            return msgspec.msgpack.decode(await future, type=kind)
        finally:
            del self._pending[number]

    def _on_message(self, message: ToChild) -> None:
        if isinstance(message, Drain):
            self._on_drain()
        elif (future := self._pending.get(message.id)) is not None and not future.done():
            future.set_result(message.content)

    def _on_lost(self) -> None:
        self._lost.set()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Unavailable("the supervisor is gone"))
        # Who would kill a process that hangs is no more.
        asyncio.get_running_loop().call_later(self._orphan_s, os._exit, EXIT_ORPHAN)
        self._on_drain()


def _read_exactly(control: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = control.recv(nbytes - len(data))
        if not more:
            raise EOFError("the supervisor went away")
        data += more
    return data
