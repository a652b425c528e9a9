"""Describes how the bytes of a resident come to the device: from a gateway's slot, from a host copy, or from a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewire.service.engine.backends.contract import Backend, Copier, HostBytes
from tilewire.service.engine.backends.host import flat_bytes, tensor_of
from tilewire.service.engine.tensors.resident import Resident, cut, write_copy
from tilewire.service.engine.tensors.transfers import Steps, pieces_of


@dataclass(eq=False, slots=True)
class Arrival:
    """A tensor whose memory is on the device, and whose bytes are not yet.

    Attributes:
        steps: Bring them.
        fd: Descriptor of its host copy; -1 without one.
        ticket: Number under which it waits; 0 for one that has its version, or gets it here.
    """

    resident: Resident
    steps: Steps
    fd: int = -1
    ticket: int = 0


def begin_arrival(
    backend: Backend, resident: Resident, copy: HostBytes | None, source: HostBytes | None = None, fd: int = -1
) -> Steps:
    """Makes memory on the device for a tensor, or for this engine's part of it.

    Args:
        backend: Backend of the device.
        resident: The tensor.
        copy: Memory of ours for all of it, in C order; None for a part without a host copy.
        source: Where the bytes come from; None where `copy` has them already.
        fd: Shared memory that `copy` maps, which gets the bytes of `source`; -1 where it gets none.

    Returns:
        What brings the bytes.

    Raises:
        TooBusy: No memory on the device.
    """
    part = resident.part
    tensor = resident.tensor = backend.reserve(_own_memory(resident, copy))
    # By addresses: torch frees a tensor whose storage Python has seen with the interpreter's lock held.
    is_copy = copy is not None and 0 <= tensor.data_ptr() - copy.mapped.data_ptr() < copy.mapped.nbytes
    bytes_there = source or copy
    assert bytes_there is not None, "This is a bug: no bytes."

    def steps(copier: Copier) -> Iterator[int]:
        whole = tensor_of(bytes_there)
        if fd >= 0:
            offset = 0
            for (piece,) in pieces_of(whole):
                yield piece.nbytes
                write_copy(resident.info.name, fd, flat_bytes(piece), offset)
                offset += piece.nbytes
        if is_copy:
            return
        for there, piece in pieces_of(cut(whole, part), tensor):
            yield there.nbytes
            copier.fill(piece, there)

    return steps


def _own_memory(resident: Resident, copy: HostBytes | None) -> HostBytes:
    """Returns where the bytes of a tensor, or of this engine's part, follow one another: in its host copy, or beside it."""
    whole, part, kind = resident.info.type, resident.part, resident.held_type
    if copy is not None and part is None:
        return copy
    if copy is not None and part is not None and part.rows_in(whole)[0].shape[0] == 1:
        return HostBytes(copy.mapped, kind, copy.offset + part.offset_in(whole))
    # Untouched memory costs nothing: a device with memory of its own leaves it so.
    return HostBytes(torch.empty(max(1, kind.nbytes), dtype=torch.uint8), kind, 0)
