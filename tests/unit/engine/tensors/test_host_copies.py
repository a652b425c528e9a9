"""Copies of stored results, with a device of our own at the Protocol."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from tilewire.service.engine.backends.contract import DeviceLost
from tilewire.service.engine.backends.cpu import CpuBackend, HostCopier
from tilewire.service.engine.tensors.host_copies import PIECE_BYTES, HostCopies, HostCopy, pieces_of
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.supervisor.vault import VaultReader, VaultWriter

TIMEOUT_S = 20.0


class GatedCopier(HostCopier):
    """Copies a piece for each permit."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.sizes: list[int] = []
        self.failure: Exception | None = None

    def copy(self, piece: torch.Tensor, into: torch.Tensor) -> None:
        """See `Copier`."""
        assert self.permits.acquire(timeout=TIMEOUT_S)
        if self.failure is not None:
            raise self.failure
        self.sizes.append(piece.nbytes)
        super().copy(piece, into)


class GatedBackend(CpuBackend):
    """The CPU, with a gated copier."""

    def __init__(self) -> None:
        super().__init__()
        self.copier = GatedCopier()

    def open_copier(self) -> GatedCopier:
        """See `Backend`."""
        return self.copier


class Bench:
    """Copies into a vault.

    Args:
        stack: Closes everything.
        bytes_per_s: As in `HostCopies`.
    """

    def __init__(self, stack: contextlib.ExitStack, bytes_per_s: int = 0) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        stack.callback(self._ours.close)
        self.vault = VaultReader()
        self.backend = GatedBackend()
        self.done: queue.Queue[HostCopy] = queue.Queue()
        writer = VaultWriter(theirs.detach())
        stack.callback(writer.close)
        self.copies = HostCopies(self.backend, writer, bytes_per_s)
        self.copies.on_done = self.done.put
        stack.callback(self.copies.close)
        stack.callback(self.backend.copier.permits.release, 1000)
        self._stack = stack

    def add(self, name: str, tensor: torch.Tensor, *, is_awaited: bool = False) -> HostCopy:
        kind = TensorType(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        info = TensorInfo(name, kind, 0.0, version=1 + len(self.vault.kept), engines=(0,))
        copy = HostCopy(info, tensor, 0, is_awaited=is_awaited)
        self.copies.add(copy)
        return copy

    def next_done(self) -> HostCopy:
        return self.done.get(timeout=TIMEOUT_S)

    def kept(self, name: str) -> torch.Tensor:
        """The bytes that the vault has."""
        self.vault.drain(self._ours)
        kept = self.vault.kept[name]
        self._stack.callback(os.close, os.dup(kept.fd))
        data = os.pread(kept.fd, 2**30, 0)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @property
    def names(self) -> set[str]:
        self.vault.drain(self._ours)
        return set(self.vault.kept)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_large_result_is_copied_in_pieces(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack)
    tensor = torch.arange(3 * 2**20, dtype=torch.float32)
    copy = bench.add("w", tensor)
    bench.backend.copier.permits.release(3)
    assert bench.next_done() is copy
    assert copy.error is None
    assert bench.backend.copier.sizes == [PIECE_BYTES] * 3
    assert torch.equal(bench.kept("w").view(torch.float32), tensor)


def test_what_is_awaited_comes_first_also_between_the_pieces_of_another(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack)
    large, later = (
        bench.add("large", torch.zeros(2 * PIECE_BYTES, dtype=torch.int8)),
        bench.add("later", torch.ones(3)),
    )
    awaited = bench.add("awaited", torch.ones(2), is_awaited=True)
    bench.backend.copier.permits.release(4)
    assert [bench.next_done() for _ in range(3)] == [awaited, large, later]


def test_the_rate_holds_for_what_nobody_awaits(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack, bytes_per_s=1)
    bench.backend.copier.permits.release(10)
    bench.add("slow", torch.zeros(1000))
    awaited = bench.add("awaited", torch.zeros(1000), is_awaited=True)
    assert bench.next_done() is awaited
    assert bench.names == {"awaited"}


def test_a_copy_that_is_not_needed_ends(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack, bytes_per_s=1)
    copy = bench.add("w", torch.zeros(1000))
    bench.copies.drop(copy)
    assert bench.next_done() is copy
    assert bench.names == set()
    # The thread ends, too, with a copy under way.
    bench.add("x", torch.zeros(1000))
    bench.copies.close()


@pytest.mark.parametrize("failure", [DeviceLost("gone"), RuntimeError("a bug")])
def test_a_copy_that_fails_says_why_and_others_go_on(stack: contextlib.ExitStack, failure: Exception) -> None:
    bench = Bench(stack)
    bench.backend.copier.failure = failure
    bench.backend.copier.permits.release(2)
    bench.add("w", torch.zeros(3))
    assert str(bench.next_done().error) == f"durable: {failure}"
    bench.backend.copier.failure = None
    bench.add("x", torch.zeros(3))
    assert bench.next_done().error is None
    assert bench.names == {"x"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(1000, dtype=torch.int64),
        torch.arange(60, dtype=torch.float32).view(3, 4, 5),
        # Rows that are padded, as kernels leave them.
        torch.arange(64, dtype=torch.int8).view(4, 16)[:, :13],
        torch.zeros(0, 3),
        torch.tensor(5.0),
    ],
    ids=["flat", "cube", "padded", "empty", "scalar"],
)
def test_pieces_hold_all_bytes_in_order(tensor: torch.Tensor) -> None:
    pieces = [piece.contiguous().view(-1).view(torch.uint8) for piece in pieces_of(tensor, 64)]
    whole = tensor.contiguous().view(-1).view(torch.uint8)
    assert torch.equal(torch.cat(pieces) if pieces else whole[:0], whole)
    assert all(piece.numel() <= 64 for piece in pieces)
