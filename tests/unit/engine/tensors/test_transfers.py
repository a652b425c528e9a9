"""The thread that moves tensors, with a device of our own at the Protocol."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial

import pytest
import torch

from tests.support.descriptors import open_descriptors
from tests.support.no_memory import no_more_memory
from tests.support.no_threads import no_more_threads
from tests.support.transfers import host_copy
from tilewire.service.engine.backends.contract import PIECE_BYTES, DeviceLost, HostBytes
from tilewire.service.engine.backends.cpu import CpuBackend, HostCopier
from tilewire.service.engine.backends.host import dtype_name
from tilewire.service.engine.tensors.arrivals import begin_arrival
from tilewire.service.engine.tensors.host_copies import HostCopy, copy_steps, download_steps
from tilewire.service.engine.tensors.resident import (
    Resident,
    close_copy,
    make_copy,
    map_copy,
    map_file,
    write_copy,
)
from tilewire.service.engine.tensors.transfers import Steps, Transfer, TransferThread, pieces_of
from tilewire.service.errors import TooBusy, Unavailable
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import Part

TIMEOUT_S = 20.0


class GatedCopier(HostCopier):
    """Moves a piece for each permit."""

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


class FarBackend(CpuBackend):
    """A device with memory of its own: no resident is its host copy, and rows are padded."""

    def reserve(self, kept: HostBytes) -> torch.Tensor:
        """See `Backend`."""
        like = super().reserve(kept)
        if like.dim() < 2:
            return torch.empty_like(like)
        return torch.empty((*like.shape[:-1], like.shape[-1] + 3), dtype=like.dtype)[..., : like.shape[-1]]


class Bench:
    """A thread, and what it has finished.

    Args:
        stack: Closes everything.
        bytes_per_s: As in `TransferThread`.
        max_yield_s: As there; without it what nobody awaits comes last.
    """

    def __init__(self, stack: contextlib.ExitStack, bytes_per_s: int = 0, max_yield_s: float = 1e9) -> None:
        self.copier = GatedCopier()
        backend = GatedBackend()
        backend.copier = self.copier
        self._calls: queue.Queue[Callable[[], object]] = queue.Queue()
        self._over: list[tuple[str, Exception | None]] = []
        self.thread = TransferThread(backend, self._calls.put, bytes_per_s, max_yield_s=max_yield_s)
        stack.callback(self.thread.close)
        stack.callback(self.copier.permits.release, 1000)

    def add(self, name: str, size: int, *, is_awaited: bool = False) -> tuple[Transfer, torch.Tensor]:
        """Begins a download of so many int8; the transfer, and where it goes."""
        into = torch.zeros(size, dtype=torch.int8)
        steps = download_steps(torch.ones(size, dtype=torch.int8), slot_of(into))
        transfer = Transfer(steps, lambda error: self._over.append((name, error)), is_awaited=is_awaited)
        self.thread.add(transfer)
        return transfer, into

    def call(self) -> None:
        """Does what the thread posts next."""
        self._calls.get(timeout=TIMEOUT_S)()

    def next_over(self) -> tuple[str, Exception | None]:
        """The next transfer that is over, and with what it failed."""
        self.call()
        return self._over.pop()


def slot_of(tensor: torch.Tensor) -> HostBytes:
    kind = TensorType(dtype_name(tensor.dtype), tuple(tensor.shape))
    return HostBytes(tensor.reshape(-1).view(torch.uint8), kind, 0)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_large_tensor_is_moved_in_pieces(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack)
    _, into = bench.add("w", 3 * PIECE_BYTES)
    bench.copier.permits.release(3)
    assert bench.next_over() == ("w", None)
    assert bench.copier.sizes == [PIECE_BYTES] * 3
    assert bool((into == 1).all())


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_that_was_moved_is_held_by_who_waited(stack: contextlib.ExitStack, *, fails: bool) -> None:
    bench = Bench(stack)
    bench.copier.failure = TooBusy("no memory") if fails else None
    bench.copier.permits.release()
    from_ = torch.ones(10, dtype=torch.int8)
    held = weakref.ref(from_)
    # As a host copy does: it has the transfer, whose steps have the copy.
    copy = HostCopy(TensorInfo("w", TensorType("int8", (10,)), 0.0))
    over: list[Exception | None] = []
    copy.transfer = Transfer(partial(copy_steps, copy, from_), over.append)
    gc.disable()
    stack.callback(gc.enable)
    bench.thread.add(copy.transfer)
    del from_
    bench.call()
    assert [error is not None for error in over] == [fails]
    # Its frames hold what failed.
    over.clear()
    bench.copier.failure = None
    close_copy(copy.fd)
    # The thread lets go of it just behind the call.
    bench.add("next", 1)
    bench.copier.permits.release()
    assert bench.next_over() == ("next", None)
    assert held() is None


def test_where_no_thread_can_be_started_the_next_transfer_tries_again(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack)
    with no_more_threads():
        bench.add("refused", 10)
    name, error = bench.next_over()
    assert (name, str(error)) == ("refused", "the system allows no more threads")
    assert isinstance(error, Unavailable)
    bench.copier.permits.release()
    bench.add("next", 10)
    assert bench.next_over() == ("next", None)


def test_those_that_are_awaited_take_turns(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack)
    bench.add("large", 10 * PIECE_BYTES, is_awaited=True)
    bench.add("small", 10, is_awaited=True)
    bench.copier.permits.release(3)
    assert bench.next_over()[0] == "small"
    bench.copier.permits.release(8)
    assert bench.next_over()[0] == "large"


def test_what_is_awaited_comes_first_also_between_the_pieces_of_another(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack)
    bench.add("large", 2 * PIECE_BYTES)
    bench.add("later", 3)
    bench.add("awaited", 2, is_awaited=True)
    bench.copier.permits.release(4)
    assert [bench.next_over()[0] for _ in range(3)] == ["awaited", "large", "later"]


def test_the_rate_holds_for_what_nobody_awaits(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack, bytes_per_s=1)
    bench.copier.permits.release(10)
    _, slow = bench.add("slow", 1000)
    bench.add("awaited", 1000, is_awaited=True)
    assert bench.next_over() == ("awaited", None)
    assert not slow.any()


def test_what_nobody_awaits_yields_to_the_device_for_a_while(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack, max_yield_s=0.02)
    bench.thread.is_busy = lambda: True
    bench.copier.permits.release(1)
    bench.add("w", 10)
    assert bench.next_over() == ("w", None)


def test_what_nobody_awaits_comes_too_while_others_come_on_and_on(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack, max_yield_s=0)
    bench.add("endless", 100 * PIECE_BYTES, is_awaited=True)
    bench.add("copy", 3 * PIECE_BYTES)
    bench.copier.permits.release(20)
    assert bench.next_over() == ("copy", None)


def test_a_device_that_has_no_copier_fails_its_transfers(stack: contextlib.ExitStack) -> None:
    class Broken(CpuBackend):
        def open_copier(self) -> HostCopier:
            raise RuntimeError("no memory")

    thread = TransferThread(Broken(), lambda _call: None)
    stack.callback(thread.close)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            thread.run(download_steps(torch.ones(5), slot_of(torch.zeros(5))))


def test_what_is_not_needed_ends(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack, bytes_per_s=1)
    transfer, into = bench.add("w", 1000)
    bench.thread.drop(transfer)
    assert bench.next_over() == ("w", None)
    assert not into.any()
    # The thread ends, too, with a transfer under way.
    bench.add("x", 1000)
    bench.thread.close()


@pytest.mark.parametrize("failure", [DeviceLost("gone"), RuntimeError("a bug")])
def test_one_that_fails_says_why_and_others_go_on(stack: contextlib.ExitStack, failure: Exception) -> None:
    bench = Bench(stack)
    bench.copier.failure = failure
    bench.copier.permits.release(2)
    bench.add("w", 3)
    assert bench.next_over() == ("w", failure)
    bench.copier.failure = None
    bench.add("x", 3)
    assert bench.next_over() == ("x", None)


def test_one_that_finds_no_memory_is_refused(stack: contextlib.ExitStack) -> None:
    def steps(_: object) -> Generator[int]:
        yield torch.empty(2**30, dtype=torch.uint8).nbytes

    bench, over = Bench(stack), queue.SimpleQueue[Exception | None]()
    with no_more_memory():
        bench.thread.add(Transfer(steps, over.put, is_posted=False))
        error = over.get(timeout=TIMEOUT_S)
    assert isinstance(error, TooBusy)
    assert str(error) == "no memory on the host for a copy"


def test_before_the_loop_serves_it_waits_for_a_tensor(stack: contextlib.ExitStack) -> None:
    bench = Bench(stack)
    into = torch.zeros(5)
    bench.copier.permits.release(1)
    bench.thread.run(download_steps(torch.ones(5), slot_of(into)))
    assert into.tolist() == [1] * 5
    bench.copier.failure = DeviceLost("gone")
    bench.copier.permits.release(1)
    with pytest.raises(DeviceLost, match="gone"):
        bench.thread.run(download_steps(torch.ones(5), slot_of(into)))


def ran(steps: Steps) -> None:
    for _ in steps(HostCopier()):
        pass


def test_a_host_copy_is_shared_memory_of_its_own() -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    copy = HostCopy(TensorInfo("w", TensorType("float32", (3, 4)), 0.0))
    ran(partial(copy_steps, copy, tensor))
    assert map_file(copy.fd, tensor.nbytes).view(torch.float32).view(3, 4).tolist() == tensor.tolist()
    os.close(copy.fd)


def test_a_host_copy_that_ends_early_leaves_no_descriptor() -> None:
    copy = HostCopy(TensorInfo("w", TensorType("float32", (3, 4)), 0.0))
    steps = copy_steps(copy, torch.ones(3, 4), HostCopier())
    assert isinstance(steps, Generator)
    before = open_descriptors()
    next(steps)
    made = open_descriptors() - before
    assert len(made) == 1
    steps.close()
    assert copy.fd == -1
    assert not made & open_descriptors()


@pytest.mark.parametrize("backend", [CpuBackend(), CpuBackend(batch_invariant=True), FarBackend()])
@pytest.mark.parametrize(
    ("part", "has_copy"),
    [(None, True), *itertools.product((Part(-1, 1, 3), Part(-2, 0, 2), Part(-2, 1, 3)), (True, False))],
)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (0, 3, 4)])
@pytest.mark.parametrize("fortran", [True, False])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_tensor_or_its_part_arrives(
    backend: CpuBackend, part: Part | None, shape: tuple[int, ...], *, has_copy: bool, fortran: bool, offset: int
) -> None:
    count = int(torch.tensor(shape).prod())
    whole, kind = torch.arange(count, dtype=torch.float32).view(shape), TensorType("float32", shape)
    laid = whole.permute(*reversed(range(len(shape)))).contiguous() if fortran else whole
    slot = torch.zeros(offset + kind.nbytes, dtype=torch.uint8)
    slot[offset:] = laid.reshape(-1).view(torch.uint8)
    resident = Resident(TensorInfo("w", kind, 0.0), part)
    fd, copy = host_copy(kind) if has_copy else (-1, None)
    ran(begin_arrival(backend, resident, copy, HostBytes(slot, kind, offset, fortran=fortran), fd))
    close_copy(fd)
    slot.zero_()
    expected = whole if part is None else whole.narrow(part.axis, part.begin, part.end - part.begin)
    assert resident.tensor is not None
    assert torch.equal(resident.tensor, expected)
    if copy is not None:
        assert torch.equal(copy.mapped[: kind.nbytes].view(torch.float32).view(shape), whole)
        # From the copy alone, as the next process takes it.
        again = Resident(TensorInfo("w", kind, 0.0), part)
        ran(begin_arrival(backend, again, copy))
        assert again.tensor is not None
        assert torch.equal(again.tensor, expected)


def test_a_host_copy_that_cannot_be_mapped_is_refused() -> None:
    fd, nbytes = make_copy("w", 2**30), 2**30
    with no_more_memory(), pytest.raises(TooBusy, match="w: no host copy: no memory"):
        map_copy("w", fd, nbytes)
    close_copy(fd)


def test_a_host_copy_that_has_no_memory_is_refused() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(TooBusy, match="w: no host copy: No space left on device"):
            write_copy("w", fd, memoryview(b"bytes"), 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(1000, dtype=torch.int64),
        torch.arange(60, dtype=torch.float32).view(3, 4, 5),
        # Rows that are padded, as kernels leave them.
        torch.arange(64, dtype=torch.int8).view(4, 16)[:, :13],
        # Rows that are longer than a piece.
        torch.arange(600, dtype=torch.int16).view(3, 200)[:, :150],
        torch.arange(600, dtype=torch.float32).view(3, 200).t(),
        torch.zeros(0, 3),
        torch.tensor(5.0),
    ],
    ids=["flat", "cube", "padded", "long", "turned", "empty", "scalar"],
)
def test_pieces_hold_all_bytes_in_order(tensor: torch.Tensor) -> None:
    into = torch.full(tensor.shape, -1, dtype=tensor.dtype)
    pieces = list(pieces_of(tensor, into, piece_bytes=64))
    for one, other in pieces:
        other.copy_(one)
    assert torch.equal(into, tensor)
    assert all(piece.nbytes <= 64 for piece, _ in pieces)
    whole = torch.cat([piece.reshape(-1) for piece, _ in pieces]) if pieces else tensor.reshape(-1)
    assert torch.equal(whole, tensor.reshape(-1))
