"""Host copies of resident tensors and clients' regions, held by the supervisor for the next engine and for the other engines.

Owns the messages and the ends of their sockets. The home engine deposits each change in its order (a descriptor travels beside
the message). The supervisor keeps the last change of each name, hands it to a new engine as `Keepsakes`, and feeds every change
to the engines that follow, in the same order: all engines go through the same states.
The kernel's socket buffer outlives a crashed engine, so a change that was deposited before a crash is taken in after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterator

import msgspec

from tilewire.service.ipc.messages import RegionInfo, TensorInfo
from tilewire.service.supervisor.handover import Keepsakes, Kept, KeptRegion

MAX_MESSAGE_BYTES = 8192


class Deposit(msgspec.Struct, frozen=True, tag="tensor"):
    """One change. Each version is larger than the one before.

    Attributes:
        name: Name of the tensor.
        info: None when the tensor was deleted.
        version: Version of the change.
        is_of_file: Whether a file of `--tensors-dir` has the name: its deletion must outlive the engine.
    """

    name: str
    info: TensorInfo | None
    version: int
    is_of_file: bool = False


class RegionDeposit(msgspec.Struct, frozen=True, tag="region"):
    """One change. `info` is None when the region was unregistered."""

    name: str
    info: RegionInfo | None


class VaultWriter:
    """The engine's end.

    Args:
        fd: A sequenced-packet socket to the supervisor; negative for no vault.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd) if fd >= 0 else None

    def keep(self, info: TensorInfo, fd: int) -> None:
        """Deposits a host copy before its upload is acknowledged."""
        self._send(Deposit(info.name, info, info.version), [fd])

    def forget(self, name: str, version: int, *, is_of_file: bool) -> None:
        """Deposits that a tensor is no more."""
        self._send(Deposit(name, None, version, is_of_file), [])

    def keep_region(self, info: RegionInfo, fd: int) -> None:
        """Deposits a region before its registration is acknowledged."""
        self._send(RegionDeposit(info.name, info), [fd])

    def forget_region(self, name: str) -> None:
        """Deposits that a region is no more."""
        self._send(RegionDeposit(name, None), [])

    def close(self) -> None:
        """Ends the deposits; what was sent is still heard."""
        if self._socket is not None:
            self._socket.close()

    def _send(self, deposit: Deposit | RegionDeposit, fds: list[int]) -> None:
        if self._socket is not None:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(deposit)], fds)


class VaultFollower:
    """A following engine's end: receives the home engine's changes.

    Args:
        fd: A sequenced-packet socket to the supervisor; negative for none.

    Attributes:
        is_open: More changes can come.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd) if fd >= 0 else None
        self.is_open = self._socket is not None
        if self._socket is not None:
            self._socket.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to watch; -1 without a socket."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Ends the changes."""
        self.is_open = False
        if self._socket is not None:
            self._socket.close()

    def take(self) -> list[Kept]:
        """Receives every change that has come, in order; the caller owns their descriptors."""
        changes: list[Kept] = []
        while self._socket is not None and self.is_open:
            try:
                data, fds, _flags, _address = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
            except BlockingIOError:
                break
            if not data:
                self.is_open = False
                break
            deposit = msgspec.msgpack.decode(data, type=Deposit)
            changes.append(Kept(deposit.name, deposit.info, fds[0] if fds else -1, deposit.version))
        return changes


class VaultFeed:
    """The supervisor's end of a following engine's socket: sends changes in order and keeps what the socket has no room for.

    Args:
        sock: A non-blocking sequenced-packet socket. It lasts over the engine's restarts.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unsent: deque[tuple[bytes, int]] = deque()

    def send(self, deposit: Deposit, fd: int) -> None:
        """Sends a change; `fd` stays the caller's, -1 for none."""
        data = msgspec.msgpack.encode(deposit)
        if self._unsent or not self._sent(data, fd):
            self._unsent.append((data, os.dup(fd) if fd >= 0 else -1))
            asyncio.get_running_loop().add_writer(self._socket, self._flush)

    def clear(self) -> None:
        """Drops what is unsent: the engine that starts now gets it with its settings."""
        if self._unsent:
            asyncio.get_running_loop().remove_writer(self._socket)
        while self._unsent:
            self._close(self._unsent.popleft()[1])

    def _flush(self) -> None:
        while self._unsent:
            if not self._sent(*self._unsent[0]):
                return
            self._close(self._unsent.popleft()[1])
        asyncio.get_running_loop().remove_writer(self._socket)

    def _sent(self, data: bytes, fd: int) -> bool:
        try:
            socket.send_fds(self._socket, [data], [fd] if fd >= 0 else [])
        except BlockingIOError:
            return False
        return True

    @staticmethod
    def _close(fd: int) -> None:
        if fd >= 0:
            os.close(fd)


class VaultReader:
    """The supervisor's end of the home engine's socket.

    Attributes:
        kept: Last change of each tensor.
        kept_regions: Regions that are registered.
        version: Version of the last change of a tensor.
        feeds: Ends of the engines that follow.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}
        self.kept_regions: dict[str, KeptRegion] = {}
        self.version = 0
        self.feeds: list[VaultFeed] = []
        self._num_handovers = 0
        self._replaced: list[int] = []

    @contextlib.contextmanager
    def handover(self) -> Iterator[Keepsakes]:
        """Yields what the next engine takes over; none of its descriptors is closed until the block ends."""
        self._num_handovers += 1
        try:
            yield Keepsakes(list(self.kept.values()), list(self.kept_regions.values()), self.version)
        finally:
            self._num_handovers -= 1
            self._close_replaced()

    def _close_replaced(self) -> None:
        while self._replaced and not self._num_handovers:
            os.close(self._replaced.pop())

    def drain(self, sock: socket.socket) -> None:
        """Takes in everything that has arrived on a non-blocking socket."""
        while True:
            try:
                data, fds, _flags, _address = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            if not data:
                return
            deposit = msgspec.msgpack.decode(data, type=Deposit | RegionDeposit)
            fd = fds[0] if fds else -1
            if isinstance(deposit, Deposit):
                older: Kept | KeptRegion | None = self.kept.pop(deposit.name, None)
                if deposit.info is not None or deposit.is_of_file:
                    self.kept[deposit.name] = Kept(deposit.name, deposit.info, fd, deposit.version)
                self.version = deposit.version
                for feed in self.feeds:
                    feed.send(deposit, fd)
            else:
                older = self.kept_regions.pop(deposit.name, None)
                if deposit.info is not None:
                    self.kept_regions[deposit.name] = KeptRegion(deposit.info, fd)
            if older is not None and older.fd >= 0:
                self._replaced.append(older.fd)
                self._close_replaced()
