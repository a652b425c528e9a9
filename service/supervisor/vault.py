"""What outlives an engine: host copies of resident tensors and clients' regions, held by the supervisor for the next engine.

Owns the messages and the two ends of their socket: the engine tells what it made resident or registered (a descriptor travels
beside the message) or forgot; the supervisor keeps the last word on each name and hands it on as `settings.Keepsakes`.
The kernel's socket buffer outlives a crashed engine, so what was said before a crash is heard after it.
"""

from __future__ import annotations

import os
import socket

import msgspec

from tilewire.service.ipc.messages import RegionInfo, TensorInfo
from tilewire.service.supervisor.handover import Keepsakes, Kept, KeptRegion

MAX_MESSAGE_BYTES = 8192


class Deposit(msgspec.Struct, frozen=True, tag="tensor"):
    """One change. `info` is None when the tensor was deleted."""

    name: str
    info: TensorInfo | None


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
        self._send(Deposit(info.name, info), [fd])

    def forget(self, name: str) -> None:
        """Deposits that a tensor is no more."""
        self._send(Deposit(name, None), [])

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


class VaultReader:
    """The supervisor's end, and what it keeps.

    Attributes:
        kept: The last word on each tensor.
        kept_regions: The regions that are registered.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}
        self.kept_regions: dict[str, KeptRegion] = {}

    @property
    def keepsakes(self) -> Keepsakes:
        """For the next engine."""
        return Keepsakes(list(self.kept.values()), list(self.kept_regions.values()))

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
                older: Kept | KeptRegion | None = self.kept.get(deposit.name)
                self.kept[deposit.name] = Kept(deposit.name, deposit.info, fd)
            else:
                older = self.kept_regions.pop(deposit.name, None)
                if deposit.info is not None:
                    self.kept_regions[deposit.name] = KeptRegion(deposit.info, fd)
            if older is not None and older.fd >= 0:
                os.close(older.fd)
