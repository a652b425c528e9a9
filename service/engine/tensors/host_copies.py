"""Copies stored results to the host in the background, and deposits them in the vault.

One thread copies, in pieces, so that neither the engine's loop nor the requests on the device wait for a whole tensor. Results
that a request awaits come first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from tilewire.service.engine.backends.contract import Backend, Copier, DeviceLost
from tilewire.service.engine.tensors.resident import close_copy, make_copy, map_file
from tilewire.service.errors import TilewireError, TooBusy
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.supervisor.vault import VaultWriter

logger = logging.getLogger(__name__)

# A piece leaves the device in a fraction of a millisecond, and requests that come meanwhile wait no longer.
PIECE_BYTES = 4 * 2**20
# A piece waits so long for a moment without a launch; copies must end on a device that is always busy, too.
MAX_YIELD_S = 0.02
YIELD_STEP_S = 0.0005


@dataclass(eq=False)
class HostCopy:
    """A copy to make.

    Attributes:
        tensor: The tensor on the device; None for one whose copy is there already.
        home: Index of the engine that gave its version; for a copy that is deposited.
        ticket: Number of a tensor that waits for its version; 0 for one that has it, whose copy is deposited.
        fd: Descriptor of the copy of a tensor with a ticket, which is the receiver's; -1 without one.
        is_taken: The loop has the outcome, which the thread sets before.
        is_needless: The tensor was replaced or deleted.
        is_awaited: A request waits for it: it comes before those that nobody awaits, and as fast as it goes.
        error: Why there is no copy, or no file in the store; None without a failure.
        replaced: Whether the store had a tensor before it, or this host a result that the store has not.
    """

    info: TensorInfo
    tensor: torch.Tensor | None
    home: int = 0
    ticket: int = 0
    fd: int = -1
    is_taken: bool = False
    is_needless: bool = False
    is_awaited: bool = False
    error: TilewireError | None = None
    replaced: bool = False


@dataclass(eq=False)
class HostCopies:
    """The copies of one engine.

    Args:
        backend: Backend of the device.
        vault: Gets each copy.
        bytes_per_s: Rate of copies that no request awaits; 0 for any.
        is_busy: Whether the device computes; called by the thread.

    Attributes:
        on_done: Called by the thread with each copy that is made, failed or needless.
    """

    backend: Backend
    vault: VaultWriter
    bytes_per_s: int = 0
    is_busy: Callable[[], bool] = lambda: False
    on_done: Callable[[HostCopy], object] = lambda _copy: None
    _waiting: list[HostCopy] = field(default_factory=list, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _is_closing: bool = field(default=False, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _copier: Copier = field(init=False)

    def add(self, copy: HostCopy) -> None:
        """Queues a copy."""
        with self._changed:
            self._waiting.append(copy)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="host-copies", daemon=True)
            self._thread.start()

    def drop(self, copy: HostCopy) -> None:
        """Says that a copy is not needed any more."""
        with self._changed:
            copy.is_needless = True
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread; what is not copied is lost."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        self._copier = self.backend.open_copier()
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if self._is_closing:
                    return
                copy = self._first_awaited() or self._waiting[0]
                self._waiting.remove(copy)
            self._finish(copy)

    def _first_awaited(self) -> HostCopy | None:
        return next((one for one in self._waiting if one.is_awaited), None)

    def _finish(self, copy: HostCopy) -> None:
        try:
            self._make(copy)
        except Exception as error:
            if not isinstance(error, TilewireError | DeviceLost):
                logger.exception("no host copy of %s", copy.info.name)
            copy.error = TooBusy(f"durable: {error}")
        self.on_done(copy)

    def _make(self, copy: HostCopy) -> None:
        assert copy.tensor is not None, "This is a bug: its copy is there."
        info, began_s, num_copied = copy.info, time.monotonic(), 0
        fd = make_copy(info.name, info.type.nbytes)
        try:
            whole = map_file(fd, info.type.nbytes)
            for piece in pieces_of(copy.tensor):
                if not self._may_go_on(copy, began_s, num_copied + piece.nbytes):
                    return
                self._copier.copy(piece, whole[num_copied : num_copied + piece.nbytes])
                num_copied += piece.nbytes
            if copy.ticket:
                copy.fd, fd = fd, -1
            else:
                self.vault.keep_copy(info, fd, copy.home)
        finally:
            close_copy(fd)

    def _may_go_on(self, copy: HostCopy, began_s: float, num_bytes: int) -> bool:
        """Waits for a good moment, and makes the copies that are awaited meanwhile; False when the copy is not needed."""
        turn_s = began_s + num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        while not (copy.is_awaited or copy.is_needless or self._is_closing):
            with self._changed:
                if (urgent := self._first_awaited()) is not None:
                    self._waiting.remove(urgent)
                elif (left_s := turn_s - time.monotonic()) <= 0:
                    break
                else:
                    self._changed.wait(left_s)
                    continue
            self._finish(urgent)
        end_s = time.monotonic() + MAX_YIELD_S
        while self.is_busy() and not copy.is_awaited and time.monotonic() < end_s:
            time.sleep(YIELD_STEP_S)
        return not (copy.is_needless or self._is_closing)


def pieces_of(tensor: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
    """Yields parts of a tensor, in C order, as views of about so many bytes."""
    if not tensor.numel():
        return
    whole = tensor.view(-1) if tensor.is_contiguous() else tensor
    rows = max(1, piece_bytes // (tensor.nbytes // len(whole)))
    for begin in range(0, len(whole), rows):
        yield whole[begin : begin + rows]
