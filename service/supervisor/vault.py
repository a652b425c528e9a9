"""Host copies of resident tensors and clients' regions, held by the supervisor for the next engine and for the other engines.

Owns the messages and both ends of their sockets. The home engine of a name deposits each change in its order (a descriptor
travels beside the message). An engine that keeps a result deposits the copy of it later. The supervisor keeps the last
change of each name, and hands it to a new engine as `Handover`. It feeds every change to the other engines in the order
of its home. The kernel's socket buffer outlives a crashed engine, so a change that was deposited before a crash is
taken in after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from tilewire.service.errors import Unavailable
from tilewire.service.ipc.messages import RegionInfo, TensorInfo
from tilewire.service.supervisor.handover import Handover, Kept, KeptRegion

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 8192
# One descriptor, as the kernel sends it.
FD_BYTES = 4
# Time in which a tensor that its holder has no more may yet get its version, in seconds.
LEFT_S = 120.0


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """The host copy of a tensor that waits for its version; without a descriptor it is taken back.

    Attributes:
        ticket: Number of the tensor on its engine.
        is_unsure: It is taken back, and may have got its version, or may yet.
    """

    ticket: int
    is_unsure: bool = False


class RegionDeposit(msgspec.Struct, frozen=True, tag="region"):
    """One change. `info` is None when the region was unregistered."""

    name: str
    info: RegionInfo | None


class CopyRequest(msgspec.Struct, frozen=True, tag="copy_request"):
    """An engine needs a tensor that another one holds."""

    name: str


class Eviction(msgspec.Struct, frozen=True, tag="eviction"):
    """An engine has dropped a tensor whose changes `home` orders, and which `--store` has: `home` forgets that version."""

    name: str
    version: int
    home: int


def is_wanted(info: TensorInfo, engine: int) -> bool:
    """Whether an engine shall hold a tensor."""
    return info.placement == "replicate" or engine in info.engines


def _send(sock: socket.socket, deposit: msgspec.Struct, fd: int) -> None:
    socket.send_fds(sock, [msgspec.msgpack.encode(deposit)], [fd] if fd >= 0 else [])


class VaultWriter:
    """An engine's sending end. A change is ordered by its home engine; a copy may come from any engine.

    Args:
        fd: A sequenced-packet socket to the supervisor, which this owns; negative for no vault.
        home: Index of this engine.

    Raises:
        Unavailable: By each deposit that the supervisor does not take: it is gone.
    """

    def __init__(self, fd: int, home: int = 0) -> None:
        self._socket = socket.socket(fileno=fd) if fd >= 0 else None
        self._home = home

    def keep(self, info: TensorInfo, fd: int = -1, holder: tuple[int, int] = (0, 0)) -> None:
        """Deposits a change before it is acknowledged, with its host copy; -1 for none, or for one that was offered."""
        self._send(Kept(info.name, info, version=info.version, home=self._home, holder=holder), fd)

    def offer(self, ticket: int, fd: int) -> None:
        """Deposits the host copy of a tensor that waits for its version: it becomes durable with that, at once."""
        self._send(Offer(ticket), fd)

    def withdraw(self, ticket: int, *, is_unsure: bool = False) -> None:
        """Takes an offer back; see `Offer`."""
        self._send(Offer(ticket, is_unsure), -1)

    def keep_copy(self, info: TensorInfo, fd: int, home: int) -> None:
        """Deposits the host copy of a change that `home` has ordered."""
        self._send(Kept(info.name, info, version=info.version, home=home, is_copy=True), fd)

    def forget(self, name: str, version: int, *, is_of_file: bool) -> None:
        """Deposits that a tensor is no more."""
        self._send(Kept(name, version=version, home=self._home, is_of_file=is_of_file), -1)

    def request_copy(self, name: str) -> None:
        """Requests the host copy of a tensor, which comes as a change that is a copy, as soon as there is one."""
        self._send(CopyRequest(name), -1)

    def evict(self, name: str, version: int, home: int) -> None:
        """Has the engine that orders a name forget a version that was dropped here."""
        self._send(Eviction(name, version, home), -1)

    def keep_region(self, info: RegionInfo, fd: int) -> None:
        """Deposits a region before its registration is acknowledged."""
        self._send(RegionDeposit(info.name, info), fd)

    def forget_region(self, name: str) -> None:
        """Deposits that a region is no more."""
        self._send(RegionDeposit(name, None), -1)

    def close(self) -> None:
        """Ends the deposits; what was sent is still heard."""
        if self._socket is not None:
            self._socket.close()

    def _send(self, deposit: Kept | Offer | RegionDeposit | CopyRequest | Eviction, fd: int) -> None:
        if self._socket is None:
            return
        try:
            _send(self._socket, deposit, fd)
        except OSError as error:
            raise Unavailable(f"no deposit with the supervisor: {error.strerror}") from error


class VaultFollower:
    """An engine's receiving end: changes and copies of the other engines.

    Args:
        fd: A sequenced-packet socket to the supervisor, which stays the caller's; negative for none.

    Attributes:
        is_open: More changes can come.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd)) if fd >= 0 else None
        self.is_open = self._socket is not None

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
                # The sending end shares the socket's mode, and must wait when the socket is full. `recv_fds` has no flags.
                data, ancillary, _flags, _address = self._socket.recvmsg(
                    MAX_MESSAGE_BYTES, socket.CMSG_LEN(FD_BYTES), socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                break
            except ConnectionResetError:
                # The supervisor was killed.
                data = b""
            if not data:
                self.is_open = False
                break
            fd = int.from_bytes(ancillary[0][2], sys.byteorder) if ancillary else -1
            changes.append(msgspec.structs.replace(msgspec.msgpack.decode(data, type=Kept), fd=fd))
        return changes


class VaultFeed:
    """The supervisor's sending end to an engine: sends changes in order and keeps what the socket has no room for.

    Args:
        sock: A non-blocking sequenced-packet socket. It lasts over the engine's restarts.
        kept: Last change of each tensor: a change that waits has the host copy of that, and none once it is replaced.
    """

    def __init__(self, sock: socket.socket, kept: Mapping[str, Kept]) -> None:
        self._socket = sock
        self._kept = kept
        # With whether the host copy goes along.
        self._unsent: deque[tuple[Kept, bool]] = deque()

    def send(self, deposit: Kept, fd: int) -> None:
        """Sends a change; `fd` stays the caller's, -1 for none."""
        if self._unsent or not self._sent(deposit, fd):
            self._unsent.append((deposit, fd >= 0))
            asyncio.get_running_loop().add_writer(self._socket, self._flush)

    def clear(self) -> None:
        """Drops what is unsent: the engine that starts now gets it with its settings."""
        if self._unsent:
            asyncio.get_running_loop().remove_writer(self._socket)
        self._unsent.clear()

    def _flush(self) -> None:
        while self._unsent:
            deposit, has_copy = self._unsent[0]
            kept = self._kept.get(deposit.name)
            is_last = kept is not None and has_copy and kept.version == deposit.version
            if not self._sent(deposit, kept.fd if kept is not None and is_last else -1):
                return
            self._unsent.popleft()
        asyncio.get_running_loop().remove_writer(self._socket)

    def _sent(self, deposit: Kept, fd: int) -> bool:
        try:
            _send(self._socket, deposit, fd)
        except BlockingIOError:
            return False
        return True


class VaultReader:
    """The supervisor's receiving end of all engines' sockets.

    Args:
        num_engines: Number of engines.
        left_s: Time for which it keeps an offer that its engine has no more, in seconds.

    Attributes:
        versions: Version of the last change of each home engine.
        feeds: Sending ends, by the index of the engine.
    """

    def __init__(self, num_engines: int = 1, left_s: float = LEFT_S) -> None:
        self._left_s = left_s
        self.kept: dict[str, Kept] = {}
        self.kept_regions: dict[str, KeptRegion] = {}
        self.versions = [0] * num_engines
        self.feeds: dict[int, VaultFeed] = {}
        # Receiving ends, by the index of the engine.
        self._sockets: dict[int, socket.socket] = {}
        # Host copies of tensors that wait for their version, by engine and ticket.
        self._offers: dict[tuple[int, int], int] = {}
        # Those that their engines have no more.
        self._left: set[tuple[int, int]] = set()
        self._num_handovers = 0
        self._replaced: list[int] = []
        # Engines that wait for the host copy of a name.
        self._wanted: dict[str, set[int]] = {}

    @contextlib.contextmanager
    def handover(self, engine: int = 0) -> Iterator[Handover]:
        """Yields what a new engine takes over; none of its descriptors is closed until the block ends.

        What the last process has offered is kept for a while: the home engine may be about to order it.
        """
        self._num_handovers += 1
        self._leave({key for key in self._offers if key[0] == engine})
        tensors = [
            one if one.info is None or is_wanted(one.info, engine) else msgspec.structs.replace(one, fd=-1)
            for one in self.kept.values()
        ]
        try:
            yield Handover(tensors, list(self.kept_regions.values()), tuple(self.versions))
        finally:
            self._num_handovers -= 1
            self._close_replaced()

    def drain(self, sock: socket.socket, engine: int = 0) -> None:
        """Takes in everything that has arrived on the non-blocking socket of an engine."""
        self._sockets[engine] = sock
        while True:
            try:
                data, fds, flags, _address = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            if not data:
                return
            deposit = msgspec.msgpack.decode(data, type=Kept | Offer | RegionDeposit | CopyRequest | Eviction)
            fd = fds[0] if fds else -1
            if flags & socket.MSG_CTRUNC:
                logger.error("no descriptor is left: what engine-%d deposited is lost when it dies", engine)
            if isinstance(deposit, RegionDeposit):
                self._take_region(deposit, fd)
            elif isinstance(deposit, CopyRequest):
                self._wanted.setdefault(deposit.name, set()).add(engine)
                self._give(deposit.name)
            elif isinstance(deposit, Eviction):
                if deposit.home in self.feeds:
                    gone = Kept(deposit.name, version=deposit.version, home=deposit.home, is_copy=True)
                    self.feeds[deposit.home].send(gone, -1)
            elif isinstance(deposit, Offer):
                self._take_offer((engine, deposit.ticket), fd, is_unsure=deposit.is_unsure)
            else:
                holder = -1
                if deposit.holder[1]:
                    fd, holder = self._offered(deposit)
                if self._take(deposit, fd):
                    self._feed_others(deposit, fd, engine, holder)
                    self._give(deposit.name)

    def _take_offer(self, key: tuple[int, int], fd: int, *, is_unsure: bool) -> None:
        if is_unsure:
            self._leave(self._offers.keys() & {key})
            return
        self._drop(self._offers.pop(key, -1))
        if fd >= 0:
            self._offers[key] = fd

    def _offered(self, deposit: Kept) -> tuple[int, int]:
        """Returns the host copy that the holder of a change has offered, and the engine that has the tensor; -1 for none."""
        holder, _ticket = key = deposit.holder
        if key not in self._offers and holder in self._sockets:
            # The offer was sent before the change, on another socket.
            self.drain(self._sockets[holder], holder)
        is_left = key in self._left
        self._left.discard(key)
        return self._offers.pop(key, -1), -1 if is_left else holder

    def _leave(self, offers: set[tuple[int, int]]) -> None:
        """Keeps offers for a while that their engine has no more: a version may yet come."""
        left = offers - self._left
        if left:
            self._left |= left
            asyncio.get_running_loop().call_later(self._left_s, self._drop_left, left)

    def _drop_left(self, left: set[tuple[int, int]]) -> None:
        """Drops offers that got no version."""
        for key in left & self._left:
            self._left.remove(key)
            self._drop(self._offers.pop(key))

    def _take(self, deposit: Kept, fd: int) -> bool:
        """Keeps a change. Returns whether it is the last of its name."""
        older = self.kept.get(deposit.name)
        is_last = older is None or older.version < deposit.version
        if deposit.is_copy:
            # Without the change itself: the name was deleted or replaced since, or the copy came first.
            is_last = is_last and deposit.version > self.versions[deposit.home]
            is_missing = older is not None and older.version == deposit.version and older.fd < 0
            if not is_last and not is_missing:
                self._drop(fd)
                return False
        else:
            self.versions[deposit.home] = deposit.version
            if not is_last:
                # Its copy came first, or even that of a later change.
                self._drop(fd)
                return fd < 0
        if older is not None:
            self._drop(older.fd)
            del self.kept[deposit.name]
        if deposit.name and (deposit.info is not None or deposit.is_of_file):
            self.kept[deposit.name] = msgspec.structs.replace(deposit, fd=fd, is_copy=False)
        return True

    def _feed_others(self, deposit: Kept, fd: int, engine: int, holder: int) -> None:
        for index, feed in self.feeds.items():
            wants_it = deposit.info is not None and is_wanted(deposit.info, index) and index != holder
            if index == engine:
                if deposit.holder[1] and fd >= 0 and wants_it:
                    # It has ordered what another engine holds.
                    feed.send(msgspec.structs.replace(deposit, is_copy=True), fd)
            elif wants_it or not deposit.is_copy:
                feed.send(deposit, fd if wants_it else -1)

    def _give(self, name: str) -> None:
        """Sends a host copy to the engines that wait for it."""
        kept = self.kept.get(name)
        if kept is None or kept.info is None:
            self._wanted.pop(name, None)
        elif kept.fd >= 0:
            copy = Kept(name, kept.info, version=kept.version, home=kept.home, is_copy=True)
            for engine in self._wanted.pop(name, ()):
                if engine in self.feeds:
                    self.feeds[engine].send(copy, kept.fd)

    def _take_region(self, deposit: RegionDeposit, fd: int) -> None:
        older = self.kept_regions.pop(deposit.name, None)
        if deposit.info is not None and fd >= 0:
            self.kept_regions[deposit.name] = KeptRegion(deposit.info, fd)
        if older is not None:
            self._drop(older.fd)

    def _drop(self, fd: int) -> None:
        if fd >= 0:
            self._replaced.append(fd)
            self._close_replaced()

    def _close_replaced(self) -> None:
        while self._replaced and not self._num_handovers:
            os.close(self._replaced.pop())
