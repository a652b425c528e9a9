"""Launches that follow one another on a stream and share scratch memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from tilewire.kernels.runtime.launch import Launch, Variant, current_stream
from tilewire.kernels.runtime.targets import Target, is_interpreting
from tilewire.kernels.runtime.workspace import workspace

# Parts of scratch memory begin at multiples of this, so that all can be read in 16-byte pieces.
_PART_BYTES = 256


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
        tensors: Names of the tensors that a call takes, in order.
        steps: The launches.
        parts: Scratch arrays by name.
        device: Device of all tensors.
        num_counters: Length of the scratch array `count` of int32, which is zero before and after each step.
    """

    def __init__(
        self,
        tensors: Sequence[str],
        steps: Sequence[Step],
        parts: dict[str, Part],
        device: torch.device,
        num_counters: int = 0,
    ) -> None:
        self._device = device
        self._index = device.index if device.index is not None else -1
        self._parts = parts
        self._offsets: list[int] = []
        self._scratch_bytes = 0
        for part in parts.values():
            self._offsets.append(self._scratch_bytes)
            self._scratch_bytes += part.num_bytes
        self._num_counters = num_counters
        numbers = {name: number for number, name in enumerate((*tensors, "count", *parts))}
        self._steps = [(step.launch, tuple(numbers[name] for name in step.operands)) for step in steps]
        self._is_bound = all(step.launch.is_bound for step in steps)

    @property
    def is_bound(self) -> bool:
        """Whether every launch calls the driver directly."""
        return self._is_bound

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Binaries that a call launches, in order."""
        return tuple(launch.variant for launch, _ in self._steps)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch every step. Shapes, strides, dtypes and alignment must be those that were prepared."""
        if self._is_bound:
            addresses = self._addresses(tensors)
            for launch, operands in self._steps:
                launch.at(*[addresses[number] for number in operands])
            return
        if is_interpreting():
            # The interpreter takes no null pointers; operands that may be absent are float32.
            tensors = tuple(torch.zeros(1) if tensor is None else tensor for tensor in tensors)
        scratch, count = self._scratch()
        operands_of = [*tensors, count, *([] if scratch is None else self._views(scratch))]
        for launch, operands in self._steps:
            launch(*[operands_of[number] for number in operands])

    def single_steps(self, *tensors: torch.Tensor | None) -> list[Callable[[], None]]:
        """Calls that launch one step each, for measuring them apart; the driver must be called directly."""
        addresses = self._addresses(tensors)
        return [
            functools.partial(launch.at, *[addresses[number] for number in operands])
            for launch, operands in self._steps
        ]

    def _addresses(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """Addresses of all operands, in the order of their numbers."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        scratch, count = self._scratch()
        addresses.append(0 if count is None else count.data_ptr())
        if scratch is not None:
            base = scratch.data_ptr()
            addresses += [base + offset for offset in self._offsets]
        return addresses

    def _scratch(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        if not (self._parts or self._num_counters):
            return None, None
        stream = current_stream(self._index) if self._is_bound else 0
        return workspace(self._device, stream, self._scratch_bytes // 4, max(self._num_counters, 1))

    def _views(self, scratch: torch.Tensor) -> list[torch.Tensor]:
        whole = scratch.view(torch.uint8)
        return [
            whole[offset : offset + prod(part.shape) * part.dtype.itemsize].view(part.dtype).view(part.shape)
            for offset, part in zip(self._offsets, self._parts.values(), strict=True)
        ]


def bound(variant: Variant, target: Target, programs: int, sizes: Mapping[str, float], index: int) -> Launch:
    """Binds `variant` over `programs` programs, with those of `sizes` that it takes, on the device of number `index`."""
    taken = {name for name, _ in variant.signature}
    values = {name: value for name, value in sizes.items() if name in taken}
    return Launch(variant, target, (programs, 1, 1), values, index)
