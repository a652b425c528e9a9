"""Host copies of resident tensors, held by the supervisor so that a new engine has them again.

Owns the message and the two ends of its socket: the engine tells what it made resident (the copy's descriptor travels beside
the message) or deleted; the supervisor keeps the last word on each name and hands it to the next engine as `settings.Kept`.
The kernel's socket buffer outlives a crashed engine, so what was said before a crash is heard after it.
"""

from __future__ import annotations

import os
import socket

import msgspec

from service.messages import TensorInfo
from service.settings import Kept

MAX_MESSAGE_BYTES = 8192


class Deposit(msgspec.Struct, frozen=True):
    """One change. `info` is None when the tensor was deleted."""

    name: str
    info: TensorInfo | None


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

    def close(self) -> None:
        """Ends the deposits; what was sent is still heard."""
        if self._socket is not None:
            self._socket.close()

    def _send(self, deposit: Deposit, fds: list[int]) -> None:
        if self._socket is not None:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(deposit)], fds)


class VaultReader:
    """The supervisor's end, and what it keeps.

    Attributes:
        kept: The last word on each name.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}

    def drain(self, sock: socket.socket) -> None:
        """Takes in everything that has arrived on a non-blocking socket."""
        while True:
            try:
                data, fds, _flags, _address = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            if not data:
                return
            deposit = msgspec.msgpack.decode(data, type=Deposit)
            self._replace(Kept(deposit.name, deposit.info, fds[0] if fds else -1))

    def _replace(self, kept: Kept) -> None:
        older = self.kept.get(kept.name)
        if older is not None and older.fd >= 0:
            os.close(older.fd)
        self.kept[kept.name] = kept
