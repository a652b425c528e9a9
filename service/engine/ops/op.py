"""The interface between an op and the backends: how it computes on tensors of the host and of a GPU.

`registry` finds the class `Engine<Op>` of each op of `service.ops`, in a file of the op's name beside this one. Kernels are
passed in: the package `tilewire.kernels` needs Triton, and only the GPU backend imports it.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from tilewire.service.ops.op import OpOptions

OptionsT = TypeVar("OptionsT", bound=OpOptions)


class Operands(dict[str, torch.Tensor]):
    """Tensors by input name.

    Args:
        own: Tensors of this launch; their memory may be used again for others.
        resident: Resident tensors, which never change.
    """

    def __init__(self, own: Mapping[str, torch.Tensor], resident: Mapping[str, torch.Tensor]) -> None:
        super().__init__(own)
        self.update(resident)
        self.resident = resident


class KernelCall(NamedTuple, Generic[OptionsT]):
    """Call of an op's kernels on the current stream of the current device.

    Attributes:
        kernels: The package `tilewire.kernels`.
        inputs: Tensors by input name, on the device.
        outs: Results to fill, on the device; rows may be padded.
        batch_invariant: Give the same bits whatever a row is batched with.
    """

    kernels: Any
    inputs: Operands
    options: OptionsT
    outs: Sequence[torch.Tensor]
    batch_invariant: bool


Results: TypeAlias = tuple[torch.Tensor, ...]
# Launches an op on inputs like those that it was prepared with.
Compute = Callable[[Operands], None]


class Epilogue(NamedTuple):
    """Activation of a grouped matrix product, and precision of its float32 operands."""

    activation: str
    precision: str


class Summed(NamedTuple):
    """How products of an input are summed.

    Attributes:
        axis: The axis that sums go along, -1 or -2.
        precision: How float32 is multiplied.
    """

    axis: int
    precision: str


class EngineOp(abc.ABC, Generic[OptionsT]):
    """Computation of one op on either backend.

    Attributes:
        pads_rows: Whether kernels read rows, and gain from rows that begin on 16 bytes.
        multiplies: Whether the first input goes through matrix units, which not every device has for every dtype.
        takes_steps: Whether it launches several kernels, which a graph replays at once.
    """

    pads_rows: ClassVar[bool] = False
    multiplies: ClassVar[bool] = False
    takes_steps: ClassVar[bool] = False

    def on_host(
        self, inputs: Operands, options: OptionsT, outs: Sequence[tuple[torch.dtype, tuple[int, ...]]]
    ) -> Results:
        """Computes results of these dtypes and shapes on the host; see `cpu`.

        Empty ones cost nothing: what an op holds beside them, such as a number for each row, need not be empty.
        """
        if not any(math.prod(shape) for _, shape in outs):
            return tuple(torch.empty(shape, dtype=dtype) for dtype, shape in outs)
        return self.cpu(inputs, options, [dtype for dtype, _ in outs])

    @abc.abstractmethod
    def cpu(self, inputs: Operands, options: OptionsT, out_dtypes: Sequence[torch.dtype]) -> Results:
        """Computes on the host; inputs have any strides.

        Returns:
            The results, each in its dtype or in one that converts to it without further rounding.
        """

    def gpu(self, call: KernelCall[OptionsT]) -> None:
        """Launches on the current stream of the current device."""
        if all(out.numel() for out in call.outs):
            self.prepare(call)(call.inputs)

    def gpu_many(
        self, kernels: Any, inputs: Sequence[Operands], options: OptionsT, outs: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Launches several requests of unequal shapes; see `gpu`."""
        for given, results in zip(inputs, outs, strict=True):
            self.gpu(KernelCall(kernels, given, options, results, batch_invariant=False))

    @abc.abstractmethod
    def prepare(self, call: KernelCall[OptionsT]) -> Compute:
        """Binds everything but the addresses of the inputs. No result is empty.

        Raises:
            ValueError: It takes several launches.
        """

    def summed(self, name: str, options: OptionsT) -> Summed | None:
        """Returns how products of an input are summed; None where it has none. Some dtypes are laid out for that."""
        return None

    def grouped(self, options: OptionsT) -> Epilogue | None:
        """Returns the epilogue of `a @ b` when requests may be one grouped matrix product, else None."""
        return None
