"""Describes what is copied from the device to the host: stored results, for the vault or the store, and downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewire.service.engine.backends.contract import Copier, HostBytes
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.tensors.resident import cut, make_copy, map_copy
from tilewire.service.engine.tensors.shared_store import Change
from tilewire.service.engine.tensors.transfers import Steps, Transfer, pieces_of
from tilewire.service.errors import TilewireError
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.placement import Part


@dataclass(eq=False)
class HostCopy:
    """The host copy of a stored result, or of an upload that waits for its version.

    Attributes:
        transfer: Makes it; None for an upload, whose copy is there.
        change: Writes it to the store; None without one, and until there is a copy.
        ticket: Number of a tensor that waits for its version; 0 for one that has it, whose copy is deposited.
        fd: Descriptor of the copy that was made, which is the receiver's; -1 without one.
        is_taken: Whoever awaits it may have the outcome.
        error: Why there is no copy, or no file in the store; None without a failure.
        replaced: Whether the store had a tensor before it, or this host a result that the store has not.
    """

    info: TensorInfo
    transfer: Transfer | None = None
    change: Change | None = None
    ticket: int = 0
    fd: int = -1
    is_taken: bool = False
    error: TilewireError | None = None
    replaced: bool = False


def copy_steps(copy: HostCopy, tensor: torch.Tensor, copier: Copier) -> Iterator[int]:
    """Makes a host copy in new shared memory, and gives it the descriptor.

    Args:
        copy: The copy.
        tensor: The result on the device.
        copier: As for `Steps`.

    Raises:
        TooBusy: No memory, or no descriptor.
        BeyondLimit: A file may not have so many bytes.
        DeviceLost: The device failed.
    """
    kind = copy.info.type
    fd = make_copy(copy.info.name, kind.nbytes)
    try:
        yield from download_steps(tensor, HostBytes(map_copy(copy.info.name, fd, kind.nbytes), kind, 0))(copier)
    except BaseException:
        os.close(fd)
        raise
    copy.fd = fd


def download_steps(tensor: torch.Tensor, into: HostBytes, part: Part | None = None) -> Steps:
    """Returns what copies a tensor on the device to the host.

    Args:
        tensor: The tensor, or a part of it.
        into: Place of the whole tensor, aligned for its dtype.
        part: Which part; None for all of it.
    """

    def steps(copier: Copier) -> Iterator[int]:
        # Of one shape: what brought them to one on the device would run on another stream than the copier's.
        for piece, place in pieces_of(tensor, cut(tensor_of(into), part)):
            yield piece.nbytes
            copier.copy(piece, place)

    return steps
