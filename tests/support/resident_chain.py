"""Residents of two engines and the vault between them, without processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

import msgspec
import numpy as np
import torch

from tests.support.tensor_bodies import Array
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.cpu import CpuBackend, HostCopier
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.transfers import Steps
from tilewire.service.ipc.board import VersionBoard, home_of
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.match import Match
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import Placement
from tilewire.service.supervisor.handover import Kept
from tilewire.service.supervisor.vault import VaultFeed, VaultFollower, VaultReader, VaultWriter


def source(array: Array) -> HostBytes:
    data = torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8)
    return HostBytes(data, TensorType(array.dtype.name, array.shape), 0)


def residents(quota: int = 10_000, vault: VaultWriter | None = None) -> Residents:
    return Residents(CpuBackend(), quota, vault or VaultWriter(-1), clock=lambda: 12.5)


def put(
    held: Residents,
    name: str,
    source: HostBytes,
    placement: Placement = "replicate",
    axis: int = 0,
    match: Match | None = None,
) -> tuple[TensorInfo, bool]:
    """Uploads a tensor to the home engine of its name; its description, and whether it replaced another."""
    held.check_match(name, match)
    ticket, info = receive(held, name, source, placement, axis)
    try:
        return held.order_here(info, ticket, match)
    finally:
        held.release(ticket)


def receive(
    held: Residents, name: str, source: HostBytes, placement: Placement = "replicate", axis: int = 0
) -> tuple[int, TensorInfo]:
    """Uploads a tensor, or a part of it, which waits for its version; its ticket and description."""
    arrival = held.receive(name, source, placement, axis)
    run(arrival.steps)
    if arrival.fd >= 0:
        held.set_copy(arrival.ticket, arrival.fd)
    return arrival.ticket, arrival.resident.info


def run(steps: Steps) -> None:
    """Brings a tensor."""
    for _ in steps(HostCopier()):
        pass


def follow(held: Residents, change: Kept) -> None:
    """Takes over a change, with its tensor."""
    arrival = held.follow(change)
    if arrival is not None:
        run(arrival.steps)
        held.end_follow(change, arrival, None)


def restore(held: Residents, kept: Kept) -> None:
    """Takes over what the vault has, with its tensor."""
    arrival = held.restore(kept)
    if arrival is not None:
        run(arrival.steps)
        held.end_restore(arrival)


def values(held: Residents, name: str) -> list[float]:
    tensor = held.get(name).tensor
    assert tensor is not None
    return tensor.tolist()


def homed(prefix: str, home: int = 0) -> str:
    """A name whose changes engine `home` of two orders."""
    return next(name for name in (f"{prefix}{number}" for number in itertools.count()) if home_of(name, 2) == home)


# For which the vault keeps what a dead process has offered, in seconds.
LEFT_S = 0.05

W, GONE, X = homed("w"), homed("gone"), homed("x")


def pair(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return stack.enter_context(ours), stack.enter_context(theirs)


def engine(index: int, board: VersionBoard, vault: VaultWriter, quota: int = 2**30) -> Residents:
    return Residents(CpuBackend(), quota, vault, index=index, num_engines=2, board=board)


class Chain:
    """A home engine's residents, the vault, and the feed of an engine that follows."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.deposits, home_end = pair(stack)
        self.feed_end, self.follower_end = pair(stack)
        self.vault = VaultReader(2, LEFT_S)
        self.vault.feeds[1] = VaultFeed(self.feed_end, self.vault.kept)
        writer = VaultWriter(home_end.detach())
        stack.callback(writer.close)
        self.board = VersionBoard()
        self.writer = writer
        self.home = engine(0, self.board, writer)
        self._stack = stack

    def follower(self) -> tuple[Residents, VaultFollower]:
        """A process of the engine that follows, as it begins: with the vault's state."""
        self.vault.drain(self.deposits)
        begun = engine(1, self.board, VaultWriter(-1))
        with self.vault.handover(1) as kept:
            for one in kept.tensors:
                restore(begun, msgspec.structs.replace(one, fd=os.dup(one.fd) if one.fd >= 0 else -1))
            begun.versions = list(kept.versions)
        follower = VaultFollower(self.follower_end.fileno())
        self._stack.callback(follower.close)
        return begun, follower


def number(value: float) -> HostBytes:
    return source(np.full(3, value, np.float32))


def result(value: float) -> tuple[torch.Tensor, TensorType]:
    return torch.full((3,), value), TensorType("float32", (3,))


def restored(chain: Chain, index: int, name: str) -> list[float]:
    """What the next process of an engine has under a name."""
    begun = engine(index, chain.board, VaultWriter(-1))
    with chain.vault.handover(index) as kept:
        for one in kept.tensors:
            restore(begun, msgspec.structs.replace(one, fd=os.dup(one.fd) if one.fd >= 0 else -1))
    return values(begun, name)


class Offers:
    """The engine beside the home of a chain, which holds results of names that the home orders.

    Attributes:
        holder: Its residents.
        deposits: The vault's end of its socket.
        feed_end: Where the home follows.
    """

    def __init__(self, chain: Chain, stack: contextlib.ExitStack) -> None:
        self.deposits, holder_end = pair(stack)
        ours, self.feed_end = pair(stack)
        chain.vault.feeds[0] = VaultFeed(ours, chain.vault.kept)
        writer = VaultWriter(holder_end.detach(), 1)
        stack.callback(writer.close)
        self.holder = engine(1, chain.board, writer)
        # From its start on, the supervisor listens to it.
        chain.vault.drain(self.deposits, 1)


def copy_of(value: float) -> int:
    fd = os.memfd_create("copy")
    os.write(fd, np.full(3, value, np.float32).tobytes())
    return fd


def contents(held: Residents) -> dict[str, list[float]]:
    return {info.name: values(held, info.name) for info in held.infos()}


def fed(chain: Chain, held: Residents) -> None:
    """Brings what the vault has fed to the engine that follows."""
    follower = VaultFollower(chain.follower_end.fileno())
    for change in follower.take():
        follow(held, change)
    follower.close()
