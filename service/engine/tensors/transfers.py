"""Moves residents between the device and the host beside the loop: uploads, downloads, and host copies of stored results.

One thread moves them, piece by piece. So neither the engine's loop nor the requests on the device wait for a whole tensor, nor
do those that move a small one for those that move a large one. What nobody awaits comes when nobody waits, or now and then.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Protocol

import torch

from tilewire.service.engine.backends.contract import PIECE_BYTES, Backend, Copier
from tilewire.service.engine.backends.host import lacks_memory
from tilewire.service.errors import TooBusy, Unavailable

# A piece that nobody awaits waits so long for a moment without a launch, and for those that somebody awaits; copies must end on
# a device that is always busy, too.
MAX_YIELD_S = 0.02
YIELD_STEP_S = 0.0005


# Moves a tensor with a copier, a piece each time it is advanced. It yields the bytes of the piece that comes next.
Steps = Callable[[Copier], Iterator[int]]


def _closed(_: object) -> NoReturn:
    raise RuntimeError("This is a bug: the transfer is over.")


@dataclass(eq=False)
class Transfer:
    """A tensor to move.

    Attributes:
        steps: Moves it.
        end: Called when that is over, with what it failed with.
        is_awaited: Somebody waits for it: it takes turns with others of its like, as fast as they go.
        is_needless: It need not go on.
        is_posted: `end` is called in the loop thread; else by the thread that moves.
        pieces: Its steps, once it has begun.
        due_s: When its next piece may be moved at the earliest, on the monotonic clock.
    """

    steps: Steps
    end: Callable[[Exception | None], object]
    is_awaited: bool = True
    is_needless: bool = False
    is_posted: bool = True
    pieces: Iterator[int] | None = field(default=None, init=False)
    due_s: float = field(default_factory=time.monotonic, init=False)

    def close(self) -> Callable[[Exception | None], object]:
        """Returns `end`, and lets go of it and of all that the steps hold.

        What `end` is part of often holds the transfer. Tensors in such a cycle would stay until the collector looks for cycles,
        which it does after thousands of objects, whatever their size.
        """
        end = self.end
        self.end = self.steps = _closed
        self.pieces = None
        return end


class Transfers(Protocol):
    """Moves tensors beside the loop."""

    def add(self, transfer: Transfer) -> None:
        """Begins a transfer."""
        ...

    def drop(self, transfer: Transfer) -> None:
        """Says that a transfer need not go on; it ends without a failure."""
        ...

    def run(self, steps: Steps) -> None:
        """Moves a tensor and waits for it, before the loop serves.

        Raises:
            Exception: The error with which it failed.
        """
        ...

    def close(self) -> None:
        """Ends the thread; what is under way is lost."""
        ...


class TransferThread(Transfers):
    """The thread of one engine.

    Args:
        backend: Backend of the device.
        post: Has a function called in the loop thread; called by the other one.
        bytes_per_s: Rate of what nobody awaits; 0 for any.
        is_busy: Whether the device computes; called by the thread.
        max_yield_s: How long a piece that nobody awaits waits for others.
    """

    def __init__(
        self,
        backend: Backend,
        post: Callable[[Callable[[], object]], object],
        bytes_per_s: int = 0,
        is_busy: Callable[[], bool] = lambda: False,
        *,
        max_yield_s: float = MAX_YIELD_S,
    ) -> None:
        self._backend = backend
        self._post = post
        self._bytes_per_s = bytes_per_s
        self.is_busy = is_busy
        self._max_yield_s = max_yield_s
        # In order, as sets: those whose turn comes next, and those that nobody awaits, with the one that has begun first.
        self._awaited: dict[Transfer, None] = {}
        self._others: dict[Transfer, None] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, transfer: Transfer) -> None:
        with self._changed:
            (self._awaited if transfer.is_awaited else self._others)[transfer] = None
            self._changed.notify()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="transfers", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # This transfer fails, and the next one tries again.
                self._finish(transfer, Unavailable("the system allows no more threads"))
            else:
                self._thread = thread

    def drop(self, transfer: Transfer) -> None:
        with self._changed:
            transfer.is_needless = True
            if transfer in self._others:
                del self._others[transfer]
                self._awaited[transfer] = None
            self._changed.notify()

    def run(self, steps: Steps) -> None:
        over: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.add(Transfer(steps, over.put, is_posted=False))
        if (error := over.get()) is not None:
            raise error

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        copier: Copier | None = None
        while (transfer := self._next()) is not None:
            error: Exception | None = None
            try:
                copier = copier or self._backend.open_copier()
                if not transfer.is_needless and self._move(transfer, copier):
                    continue
            except Exception as failure:  # noqa: BLE001  (whoever waits gets it)
                error = TooBusy("no memory on the host for a copy") if lacks_memory(failure) else failure
            self._finish(transfer, error)
            # A failure's frames hold tensors, and the next transfer may come late.
            del transfer, error

    def _next(self) -> Transfer | None:
        """Takes the transfer whose piece is next, when its time has come; None at the end."""
        with self._changed:
            while not self._is_closing:
                awaited, other = next(iter(self._awaited), None), next(iter(self._others), None)
                pause_s = None if other is None else self._pause_s(other, has_awaited=awaited is not None)
                if pause_s == 0:
                    return other
                if awaited is not None:
                    del self._awaited[awaited]
                    return awaited
                self._changed.wait(pause_s)
        return None

    def _pause_s(self, transfer: Transfer, *, has_awaited: bool) -> float:
        """Returns how long a piece that nobody awaits shall wait; 0 when its turn has come."""
        now_s = time.monotonic()
        if transfer.due_s > now_s:
            return transfer.due_s - now_s
        if now_s < transfer.due_s + self._max_yield_s and (
            has_awaited or (transfer.pieces is not None and self.is_busy())
        ):
            return YIELD_STEP_S
        return 0.0

    def _move(self, transfer: Transfer, copier: Copier) -> bool:
        """Moves the piece whose turn it is, and queues the rest; whether there is any."""
        if transfer.pieces is None:
            transfer.pieces = transfer.steps(copier)
        nbytes = next(transfer.pieces, None)
        if nbytes is None:
            return False
        transfer.due_s = max(transfer.due_s, time.monotonic())
        if self._bytes_per_s:
            transfer.due_s += nbytes / self._bytes_per_s
        if transfer.is_awaited:
            # Those take turns; of the others one ends before the next begins.
            with self._changed:
                self._awaited[transfer] = None
        return True

    def _finish(self, transfer: Transfer, error: Exception | None) -> None:
        with self._changed:
            self._awaited.pop(transfer, None)
            self._others.pop(transfer, None)
        # What its steps hold is free when whoever waits hears of it.
        end = transfer.close()
        if transfer.is_posted:
            self._post(partial(end, error))
        else:
            end(error)


def pieces_of(*tensors: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the same parts of tensors of one dtype and shape, in C order, as views of at most about so many bytes."""
    first = tensors[0]
    if not first.numel():
        return
    if first.nbytes <= piece_bytes or not first.dim():
        yield tensors
        return
    if first.dim() > 1 and all(tensor.is_contiguous() for tensor in tensors):
        yield from pieces_of(*(tensor.view(-1) for tensor in tensors), piece_bytes=piece_bytes)
        return
    rows = piece_bytes // (first.nbytes // len(first))
    for begin in range(0, len(first), max(1, rows)):
        if rows:
            yield tuple(tensor[begin : begin + rows] for tensor in tensors)
        else:
            yield from pieces_of(*(tensor[begin] for tensor in tensors), piece_bytes=piece_bytes)
