"""`Transfers` without a thread, and tensors that are moved to a device and back in one step."""

from __future__ import annotations

import os
from collections import deque

import torch

from tilewire.service.engine.backends.contract import Backend, HostBytes
from tilewire.service.engine.tensors.arrivals import begin_arrival
from tilewire.service.engine.tensors.host_copies import download_steps
from tilewire.service.engine.tensors.resident import Resident, make_copy, map_file
from tilewire.service.engine.tensors.transfers import Steps, Transfer, Transfers
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import Part


class MovedAtOnce(Transfers):
    """Moves everything before `add` returns."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def add(self, transfer: Transfer) -> None:
        """See `Transfers`."""
        error: Exception | None = None
        try:
            self.run(transfer.steps)
        except Exception as failure:  # noqa: BLE001  (as the thread does)
            error = failure
        transfer.end(error)

    def drop(self, transfer: Transfer) -> None:
        """See `Transfers`."""
        transfer.is_needless = True

    def run(self, steps: Steps) -> None:
        """See `Transfers`."""
        for _ in steps(self._backend.open_copier()):
            pass

    def close(self) -> None:
        """See `Transfers`."""


class MovedWhenAsked(MovedAtOnce):
    """Moves nothing until `step` is called."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._waiting: deque[Transfer] = deque()

    def add(self, transfer: Transfer) -> None:
        """See `Transfers`."""
        self._waiting.append(transfer)

    def step(self, error: Exception | None = None) -> None:
        """Moves the next tensor, or fails to."""
        transfer = self._waiting.popleft()
        if error is None:
            super().add(transfer)
        else:
            transfer.end(error)

    def __len__(self) -> int:
        return len(self._waiting)


def uploaded(backend: Backend, source: HostBytes) -> torch.Tensor:
    """A tensor on the device, as an upload makes it."""
    resident = Resident(TensorInfo("uploaded", source.type, 0.0))
    fd, copy = host_copy(source.type)
    try:
        MovedAtOnce(backend).run(begin_arrival(backend, resident, copy, source, fd))
    finally:
        os.close(fd)
    assert resident.tensor is not None
    return resident.tensor


def host_copy(kind: TensorType) -> tuple[int, HostBytes]:
    """Shared memory for a host copy: its descriptor, which is the caller's, and its mapping."""
    fd = make_copy("uploaded", kind.nbytes)
    return fd, HostBytes(map_file(fd, kind.nbytes), kind, 0)


def download(backend: Backend, tensor: torch.Tensor, into: HostBytes, part: Part | None = None) -> None:
    """Copies a tensor, or a part of one, to the host, as a download does."""
    MovedAtOnce(backend).run(download_steps(tensor, into, part))
