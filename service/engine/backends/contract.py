"""Defines the interface of a backend: what the engine's loop calls to compute.

All calls come from the engine's loop thread, but `attach`, `detach` and `adopt`, which come from the one that maps memory, and
`open_copier`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Timings
from tilewire.service.ops.op import AnyOp, OpOptions, TensorType

# Objects made for each request are structs of msgspec: a dataclass takes two to four times as long to make. Where none is
# part of a cycle, they are out of the garbage collector's sight, which halves it again.


# Bytes that a `Copier` moves at once: enough for the bus's full rate, in a fraction of a millisecond.
PIECE_BYTES = 4 * 2**20


class DeviceLost(Exception):
    """The device's context is unusable: only a new process helps."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a backend, for `Welcome`, `/v2` and `tilewire_build_info`.

    Attributes:
        backend: `cpu` or `gpu`.
        device: `cpu`, `cuda:0`, …
        device_name: As its maker calls it.
        triton: Version of Triton, or "none" where it does not run.
    """

    backend: str
    device: str
    device_name: str
    torch: str
    triton: str


def extent_of(kind: TensorType, pitch: int) -> int:
    """Returns the bytes from the first of a tensor to its last; `pitch` is as in `HostBytes`."""
    nbytes = kind.nbytes
    if not pitch or not nbytes:
        return nbytes
    row = nbytes // math.prod(kind.shape[:-1])
    return (math.prod(kind.shape[:-1]) - 1) * pitch + row


class HostBytes(msgspec.Struct, eq=False, gc=False):
    """Bytes of one tensor in a mapped segment.

    Attributes:
        mapped: The segment, as a uint8 tensor that `Backend.attach` gave.
        offset: Offset of the first byte; not aligned.
        is_foreign: In a client's region, as `Backend.adopt` gave it. Its pages are pinned for the device, but the client may
            cut the file under our mapping: the CPU must never touch these bytes.
        pitch: Bytes from row to row, a row being the last dimension; 0 where rows follow one another.
    """

    mapped: torch.Tensor
    type: TensorType
    offset: int
    fortran: bool = False
    is_foreign: bool = False
    pitch: int = 0

    @property
    def extent(self) -> int:
        """Bytes from the first to the last."""
        return extent_of(self.type, self.pitch)


@dataclass(eq=False, slots=True)
class DevicePlace:
    """A result that stays on the device.

    Attributes:
        tensor: The result; None until the backend has begun its batch. Rows may be padded.
    """

    type: TensorType
    tensor: torch.Tensor | None = None


class LaunchSpec(msgspec.Struct, eq=False):
    """One launch of a batch: one request, or several whose operands are joined.

    Attributes:
        concatenated: Operands to place one after another, and the shape of the whole, by input name.
        resident: Resident inputs, the same for all requests.
        outputs: For each output, the places of its pieces, one for each request, and the shape of the whole.
        signature: Equal for launches that differ only in addresses and in the number of requests; None when the requests
            are unequal.
        kept: Place of the only result when it stays on the device; the request is then alone, and `outputs` is empty.
    """

    op: AnyOp
    options: OpOptions
    concatenated: Mapping[str, tuple[Sequence[HostBytes], tuple[int, ...]]]
    resident: Mapping[str, torch.Tensor]
    outputs: Sequence[tuple[Sequence[HostBytes], tuple[int, ...]]]
    signature: Hashable | None = None
    flops: int = 0
    kept: DevicePlace | None = None

    @property
    def count(self) -> int:
        """Number of requests."""
        return len(self.outputs[0][0]) if self.outputs else 1

    def results(self) -> list[tuple[TensorType, tuple[int, ...]]]:
        """Returns the type of one piece of each result, and the shape of the whole."""
        if self.kept is not None:
            return [(self.kept.type, self.kept.type.shape)]
        return [(pieces[0].type, shape) for pieces, shape in self.outputs]


# Called with (stage, done, total) while something takes long.
Report = Callable[[str, int, int], None]


def device_of(identity: Identity) -> dict[str, object]:
    """Returns the answer of `/v1/kernels` for a device without kernels."""
    return {
        "device": identity.device,
        "device_name": identity.device_name,
        "backend": identity.backend,
        "target": None,
        "table": None,
        "roofline": None,
        "variants": [],
        "tuned": [],
        "learned": [],
    }


@dataclass(frozen=True, slots=True)
class Preparation:
    """Preparation steps of a backend.

    Attributes:
        warmup: `none`, `load` (everything is compiled and loaded) or `run` (and tried once).
        is_tuned_online: Whether `tune` races configurations later.
        with_vendor: Whether the vendor library takes part in these races.
    """

    warmup: str = "run"
    is_tuned_online: bool = False
    with_vendor: bool = False


class CannotStart(Exception):
    """This engine must not serve; the message says why: no device, a wrong answer, a bad file."""


class LaunchFailed(Exception):
    """A batch failed by itself, and the device goes on; `error` says why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Running(Protocol):
    """A batch that was begun.

    Attributes:
        rings: Whether a thread of this process computes it, for as long as it takes and beside others, and rings at its end;
            any other one is asked whether it is over.
    """

    @property
    def rings(self) -> bool: ...

    def is_done(self) -> bool:
        """Whether `wait` returns at once.

        Raises:
            DeviceLost: The device failed.
        """
        ...

    def wait(self) -> Timings:
        """Blocks until every result is in its slot; releases the GIL meanwhile.

        Raises:
            DeviceLost: The device failed.
            LaunchFailed: A request of it failed.
        """
        ...


class Copier(Protocol):
    """Copies residents between the host and the device beside the batches; used by one thread that is not the loop's."""

    def fill(self, piece: torch.Tensor, source: torch.Tensor) -> None:
        """Copies to a piece of a tensor on the device and waits for it.

        Args:
            piece: Part of what `Backend.reserve` gave, with any strides.
            source: The same part on the host, of its dtype and shape, with any strides.

        Raises:
            DeviceLost: The device failed.
            TooBusy: No memory on the device.
        """
        ...

    def copy(self, piece: torch.Tensor, into: torch.Tensor) -> None:
        """Copies a piece of a tensor to the host and waits for it.

        Args:
            piece: On the device, with any strides; what computed it has ended.
            into: On the host, of its dtype and shape, with any strides.

        Raises:
            DeviceLost: The device failed.
            TooBusy: No memory on the device.
        """
        ...


class Backend(Protocol):
    """Computes batches on one device."""

    @property
    def identity(self) -> Identity:
        """Identity of the device and its libraries."""
        ...

    def warm_up(self, how: Preparation, report: Report, on_compile: Callable[[str], None]) -> None:
        """Brings every kernel onto the device, so that no request waits for one.

        Called once, by the thread that computes.

        Args:
            how: Settings of the warm-up.
            report: Receiver of its progress, as stages `compile`, `load` and `run`.
            on_compile: Called with the op of each kernel that is compiled, then and later. Its exceptions fail the
                request.

        Raises:
            CannotStart: Why not.
        """
        ...

    def kernels(self) -> dict[str, object]:
        """Returns the answer of `/v1/kernels` for this device."""
        ...

    def tune(self) -> bool:
        """Takes a short turn of measuring, while nothing is on the device: at most a millisecond or two.

        Returns:
            Whether there may be more to measure before the next batch.

        Raises:
            TooBusy: No memory on the device.
            DeviceLost: The device failed.
        """
        ...

    @property
    def num_learned(self) -> int:
        """Number of choices that `tune` has made; `kernels` shows them."""
        ...

    def attach(self, segment: Segment) -> torch.Tensor:
        """Makes a segment reachable for the device; returns it as a flat uint8 tensor. Another thread may compute meanwhile."""
        ...

    def detach(self, mapped: torch.Tensor) -> None:
        """Undoes `attach` or `adopt`, in the thread that called it; nothing that was begun may still use the memory."""
        ...

    def adopt(self, fd: int, offset: int, nbytes: int) -> torch.Tensor | None:
        """Makes a client's memory reachable for the device, which alone will touch it; `detach` undoes it.

        Args:
            fd: Descriptor of the client's shared-memory object, open for reading and writing.
            offset: First byte, a multiple of the page size.
            nbytes: Number of bytes.

        Returns:
            A flat uint8 tensor, or None where the CPU would have to touch the mapping: then its bytes are copied through `fd`.
        """
        ...

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Memory of our own for bytes that are copied through a descriptor, as a flat uint8 tensor."""
        ...

    def reserve(self, kept: HostBytes) -> torch.Tensor:
        """Makes memory for a resident, which a `Copier` fills.

        Args:
            kept: Memory of ours for its bytes, in C order, for as long as it is referenced. It may be the resident itself.

        Raises:
            TooBusy: No memory on the device.
        """
        ...

    def lay_out(self, tensor: torch.Tensor, op: AnyOp, name: str, options: OpOptions) -> torch.Tensor:
        """Returns a resident as an op reads its input `name` fastest: as it lies, or a copy that lies otherwise.

        Called before the first batch that reads it.
        """
        ...

    def free(self, tensors: list[torch.Tensor]) -> None:
        """Empties the list, now or soon: a resident is gone, and nobody else need wait while the system takes its memory."""
        ...

    def open_copier(self) -> Copier:
        """Prepares copies beside the batches; called by the thread that copies."""
        ...

    def begin(self, launches: Sequence[LaunchSpec]) -> Running:
        """Starts a batch, whose launches are all of one op and with equal options.

        Raises:
            TooBusy: No memory on the device for it.
            DeviceLost: The device failed.
        """
        ...
