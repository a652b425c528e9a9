"""Decides which engines hold a resident tensor, and which part of it."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from tilewire.service.errors import InvalidRequest
from tilewire.service.ops.op import TensorType

# Engines that hold a tensor: all, those that `TensorInfo.engines` names, or all with a part each.
Placement = Literal["replicate", "single", "shard"]
PLACEMENTS: dict[str, Placement] = {"replicate": "replicate", "single": "single", "shard": "shard"}
# Of a client that leaves the choice to the service.
AUTO = "auto"

# A tensor of at most this part of a device's quota is on every device: there it takes little room from others.
REPLICATED_PART = 16

# Axes along which a tensor can be cut: columns, the default, and rows, as the items of a search are.
AXES = (-1, -2)
# Parts begin at multiples of the first of these of which each engine gets several: tiles, words, elements.
STEPS = (128, 16, 1)
STEPS_EACH = 8


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A range of a tensor along one axis.

    Attributes:
        axis: Axis that is cut, counted from the last, -1.
        begin: First index.
        end: Index behind the last.
    """

    axis: int
    begin: int
    end: int

    def type_of(self, whole: TensorType) -> TensorType:
        """Returns dtype and shape of this part of a tensor."""
        shape = list(whole.shape)
        shape[self.axis] = self.end - self.begin
        return TensorType(whole.dtype, tuple(shape))

    def offset_in(self, whole: TensorType) -> int:
        """Returns the offset of the part's first byte in the tensor in C order."""
        return self.begin * _step_bytes(whole, self.axis)

    def rows_in(self, whole: TensorType) -> tuple[TensorType, int]:
        """Returns the part as rows that lie in the tensor in C order.

        Args:
            whole: Dtype and shape of the tensor.

        Returns:
            Dtype, and number and length of the rows; and the bytes from row to row.
        """
        count = math.prod(whole.shape[: self.axis])
        kind = TensorType(whole.dtype, (count, self.type_of(whole).num_elements // max(1, count)))
        return kind, whole.shape[self.axis] * _step_bytes(whole, self.axis)


def placement_of(nbytes: int, quota_bytes: int, num_engines: int = 1) -> Placement:
    """Returns where a tensor lies whose client does not say.

    Args:
        nbytes: Bytes of the tensor.
        quota_bytes: Bytes of residents that a device may hold.
        num_engines: Number of engines that can have a part.
    """
    if nbytes > quota_bytes and num_engines > 1:
        return "shard"
    return "replicate" if nbytes <= quota_bytes // REPLICATED_PART else "single"


def long_axis(kind: TensorType) -> int:
    """Returns the axis along which a tensor is cut whose client leaves the choice: the longer of the last two."""
    return -2 if len(kind.shape) > 1 and kind.shape[-2] > kind.shape[-1] else -1


def check_shard(kind: TensorType, axis: int, num_engines: int) -> None:
    """Checks that every engine gets a part of a tensor.

    Raises:
        InvalidRequest: The axis is not there, or shorter than there are engines.
    """
    if len(kind.shape) < -axis:
        raise InvalidRequest(f"axis: {axis} is not there; the tensor has {len(kind.shape)} dimensions")
    if kind.shape[axis] < num_engines:
        raise InvalidRequest(
            f"placement: shard needs a part for each of {num_engines} engines; axis {axis} has {kind.shape[axis]}"
        )


def part_of(kind: TensorType, axis: int, index: int, num_engines: int) -> Part:
    """Returns the part of a sharded tensor that an engine holds.

    Args:
        kind: Dtype and shape of the tensor.
        axis: Axis that is cut.
        index: Index of the engine.
        num_engines: Number of engines.
    """
    size = kind.shape[axis]
    step = next((one for one in STEPS if size >= one * STEPS_EACH * num_engines), 1)
    count = -(-size // step)
    begin, end = (min(size, count * one // num_engines * step) for one in (index, index + 1))
    return Part(axis, begin, end)


def _step_bytes(whole: TensorType, axis: int) -> int:
    """Bytes from one index of an axis to the next."""
    inner = () if axis == -1 else whole.shape[axis + 1 :]
    return TensorType(whole.dtype, inner).nbytes
