"""Launches that follow one another on a stream and share scratch memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from tilewire.kernels.runtime.driver import BoundLaunch
from tilewire.kernels.runtime.launch import Launch, Variant, current_stream, device_number
from tilewire.kernels.runtime.targets import is_interpreting
from tilewire.kernels.runtime.workspace import workspace
from tilewire.kernels.selection.learned import Calls

# Parts of scratch memory begin at multiples of this, so that all can be read in 16-byte pieces.
_PART_BYTES = 256


class Prepared(Protocol):
    """A call for tensors of given shapes, strides, dtypes and alignment, ready to launch on the current stream.

    Not for several threads at once.
    """

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Binaries that a call launches, in order."""

    @property
    def is_bound(self) -> bool:
        """Whether every launch calls the driver directly."""

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launches on tensors like those that were prepared."""


class Detour:
    """A prepared call that takes more than its launches: copies of tensors, or launches on parts of them.

    Args:
        run: The call.
        inner: Calls that it launches.

    Attributes:
        inner: See above.
        variants: See `Prepared`.
        is_bound: See `Prepared`.
    """

    def __init__(self, run: Callable[..., None], *inner: Prepared) -> None:
        self._run = run
        self.inner = inner
        self.variants = tuple(variant for prepared in inner for variant in prepared.variants)
        self.is_bound = all(prepared.is_bound for prepared in inner)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launches and copies on the current stream."""
        self._run(*tensors)


def single_entries(launch: Callable[..., None], out: torch.Tensor, *operands: torch.Tensor | None) -> None:
    """Calls `launch` with each entry of the outermost dimension of `operands` and `out`, for ranks that no kernel walks.

    Args:
        launch: Takes the operands' entries, then that of the output.
        out: At least one element.
        *operands: With the leading dimensions of `out`; None for one that is absent.
    """
    outermost = next(dim for dim, extent in enumerate(out.shape) if extent > 1)
    wholes = (*operands, out)
    for entry in range(out.shape[outermost]):
        launch(*(None if whole is None else whole.select(outermost, entry) for whole in wholes))


@dataclass(frozen=True)
class Step:
    """One launch of a pipeline.

    Attributes:
        launch: The bound kernel.
        operands: For each of its pointers, in order, the name of a tensor or of a scratch part.
    """

    launch: Launch
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """One array in scratch memory.

    Attributes:
        dtype: Type of its elements.
        shape: Extents.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes, rounded up to where the next part can begin."""
        return -(-prod(self.shape) * self.dtype.itemsize // _PART_BYTES) * _PART_BYTES


class Pipeline:
    """Runs steps in order on the current stream.

    Not for several threads at once.

    Args:
        tensors: Names of the tensors that a call takes, in order; those that it leaves out at the end are absent.
        steps: The launches.
        device: Device of all tensors.
        parts: Scratch arrays by name.
        num_counters: Length of the scratch array `count` of int32, which is zero before and after each step.

    Attributes:
        calls: Counter of the calls.
        is_bound: See `Prepared`.
        variants: See `Prepared`.
    """

    def __init__(
        self,
        tensors: Sequence[str],
        steps: Sequence[Step],
        device: torch.device,
        parts: Mapping[str, Part],
        num_counters: int = 0,
    ) -> None:
        self.calls = Calls()
        self._num_tensors = len(tensors)
        self._device = device
        self._index = device_number(device)
        self._parts = parts
        ends = [0, *itertools.accumulate(part.num_bytes for part in parts.values())]
        *self._offsets, self._scratch_bytes = ends
        self._has_scratch = bool(parts) or num_counters > 0
        self._num_counters = max(num_counters, 1)
        numbers = {name: number for number, name in enumerate((*tensors, "count", *parts))}
        self._steps = [(step.launch, [numbers[name] for name in step.operands]) for step in steps]
        found = [(launch.bound, operands) for launch, operands in self._steps]
        self._bound = [(bound, operands) for bound, operands in found if bound is not None]
        self.is_bound = len(self._bound) == len(found)
        self.variants = tuple(step.launch.variant for step in steps)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch every step. Shapes, strides, dtypes and alignment must be those that were prepared."""
        self.calls.count += 1
        tensors += (None,) * (self._num_tensors - len(tensors))
        if self.is_bound:
            stream = current_stream(self._index)
            addresses = self._addresses(tensors, stream)
            for bound, operands in self._bound:
                bound(stream, [addresses[number] for number in operands])
            return
        stream = 0 if is_interpreting() else current_stream(self._index)
        if is_interpreting():
            # The interpreter takes no null pointers; operands that may be absent are float32.
            tensors = tuple(torch.zeros(1) if tensor is None else tensor for tensor in tensors)
        operands_of: list[torch.Tensor | None] = [*tensors, None]
        if self._has_scratch:
            scratch, operands_of[-1] = workspace(self._device, stream, self._scratch_bytes // 4, self._num_counters)
            operands_of += self._views(scratch)
        for launch, operands in self._steps:
            launch(*[operands_of[number] for number in operands])

    def single_steps(self, *tensors: torch.Tensor | None) -> list[Callable[[], None]]:
        """Calls that launch one step each, for measuring them apart; the driver must be called directly."""
        addresses = self._addresses(tensors, current_stream(self._index))

        def launch(bound: BoundLaunch, operands: list[int]) -> None:
            # A measurement captures the call on a stream of its own.
            bound(current_stream(self._index), [addresses[number] for number in operands])

        return [functools.partial(launch, bound, operands) for bound, operands in self._bound]

    def _addresses(self, tensors: Sequence[torch.Tensor | None], stream: int) -> list[int]:
        """Addresses of all operands, in the order of their numbers."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if not self._has_scratch:
            addresses.append(0)
            return addresses
        scratch, count = workspace(self._device, stream, self._scratch_bytes // 4, self._num_counters)
        addresses.append(count.data_ptr())
        base = scratch.data_ptr()
        addresses += [base + offset for offset in self._offsets]
        return addresses

    def _views(self, scratch: torch.Tensor) -> list[torch.Tensor]:
        whole = scratch.view(torch.uint8)
        return [
            whole[offset : offset + prod(part.shape) * part.dtype.itemsize].view(part.dtype).view(part.shape)
            for offset, part in zip(self._offsets, self._parts.values(), strict=True)
        ]
