"""Describes one tensor under a name, and makes the shared memory of its host copy."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tilewire.service.config.machine import num_descriptors
from tilewire.service.engine.backends.host import lacks_memory
from tilewire.service.errors import BeyondLimit, TooBusy
from tilewire.service.ipc.arena import make_sealed
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import Part

# The part of what is left that regions may have.
REGIONS_SHARE = 8


@dataclass(slots=True, eq=False)
class Resident:
    """One tensor under a name.

    Attributes:
        info: Description as its home engine ordered it, with the engines that held it then.
        part: This engine's part of a sharded tensor; None for a tensor in one piece.
        tensor: The tensor, or this engine's part of it; None when it is not on this device.
        last_used: Unix time in seconds of the last request that read it, or None.
        hits: Number of requests that read it.
        generation: Number that no other tensor of this process has.
        has_copy: Whether the vault has its host copy, or a file its bytes.
        is_left_out: Whether bringing it to this device has failed.
        is_laid_out: Whether a request has chosen how it lies on this device.
    """

    info: TensorInfo
    part: Part | None = None
    tensor: torch.Tensor | None = None
    last_used: float | None = None
    hits: int = 0
    generation: int = 0
    has_copy: bool = True
    is_left_out: bool = False
    is_laid_out: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes on this device."""
        return 0 if self.tensor is None else self.held_type.nbytes

    @property
    def held_type(self) -> TensorType:
        """Dtype and shape of what this engine shall hold."""
        return self.info.type if self.part is None else self.part.type_of(self.info.type)

    def take_tensors(self) -> list[torch.Tensor]:
        """Returns what of it is on this device, and has it no more: who empties the list frees it, unless jobs have it."""
        taken, self.tensor = [self.tensor] if self.tensor is not None else [], None
        return taken

    def tensor_of(self, part: Part | None) -> torch.Tensor | None:
        """Returns a part of the tensor, or all of it for None; None when it is not on this device."""
        if part == self.part or self.tensor is None:
            return self.tensor
        if self.part is not None or part is None:
            return None
        return cut(self.tensor, part)


class Held(NamedTuple):
    """A tensor that waits for the version from its home engine.

    Attributes:
        resident: The tensor.
        before: Version that the name had when it began to wait; 0 for none.
        fd: Descriptor of its host copy; -1 without one, or when the vault has it.
        is_offered: Whether the vault has its host copy.
    """

    resident: Resident
    before: int
    fd: int = -1
    is_offered: bool = False


def cut(tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Returns a part of a tensor as a view; all of it for None."""
    return tensor if part is None else tensor.narrow(part.axis, part.begin, part.end - part.begin)


def max_held(max_regions: int, num_files: int) -> tuple[int, int]:
    """Returns the numbers of host copies and regions that the system lets the supervisor hold, and an engine map, at once.

    Args:
        max_regions: Number of regions that are enough.
        num_files: Number of files that the supervisor holds open for engines.
    """
    mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
    both = min(num_descriptors(num_files), mappings // 2)
    regions = min(max_regions, both // REGIONS_SHARE)
    return both - regions, regions


def make_copy(name: str, nbytes: int) -> int:
    """Makes shared memory for a host copy; returns its descriptor.

    Raises:
        TooBusy: No memory, or no descriptor.
        BeyondLimit: A file may not have so many bytes.
    """
    with _as_busy(name):
        return make_sealed("tilewire-resident", max(1, nbytes))


def write_copy(name: str, fd: int, data: memoryview, offset: int) -> None:
    """Writes bytes of a host copy: half the time of a copy to its mapping, whose pages the system would clear before.

    Raises:
        TooBusy: No memory.
    """
    with _as_busy(name):
        while data:
            num_written = os.pwrite(fd, data, offset)
            data, offset = data[num_written:], offset + num_written


def share_copy(name: str, fd: int) -> int:
    """Makes one more descriptor of a host copy, and returns it.

    Raises:
        TooBusy: No descriptor.
    """
    with _as_busy(name):
        return os.dup(fd)


def map_copy(name: str, fd: int, nbytes: int) -> torch.Tensor:
    """Maps a host copy as `map_file` does.

    Raises:
        TooBusy: No memory.
    """
    with _as_busy(name):
        return map_file(fd, nbytes)


@contextlib.contextmanager
def _as_busy(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BeyondLimit(f"{name}: no host copy: {error.strerror} for this server (ulimit -f)") from error
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC):
            raise
        raise TooBusy(f"{name}: no host copy: {error.strerror}") from error
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise TooBusy(f"{name}: no host copy: no memory") from error


def close_copy(fd: int) -> None:
    """Closes the descriptor of a host copy; -1 stands for none."""
    if fd >= 0:
        os.close(fd)


def map_file(fd: int, nbytes: int) -> torch.Tensor:
    """Maps shared memory as a flat uint8 tensor."""
    # By torch, whose mapping needs no descriptor; that of Python keeps one for each tensor.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=max(1, nbytes), dtype=torch.uint8)
