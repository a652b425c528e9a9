"""How a large request is cut into chunks of rows or elements that do not depend on one another. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewire.service.engine.backends.contract import LaunchSpec
from tilewire.service.engine.backends.host import dtype_name
from tilewire.service.ops.op import TensorType


@dataclass(frozen=True, slots=True)
class Chunks:
    """Division of a request into chunks.

    Attributes:
        names: Names of the inputs of which each chunk needs only its rows; the others come whole, first.
        rows: Number of rows of those inputs, and of each result.
        step: Rows of a chunk; the last may have fewer.
        is_flat: Whether each element is a row.
    """

    names: tuple[str, ...]
    rows: int
    step: int
    is_flat: bool = False

    def spans(self) -> list[tuple[int, int]]:
        """First row and end of each chunk."""
        return [(begin, min(begin + self.step, self.rows)) for begin in range(0, self.rows, self.step)]

    def rows_of(self, whole: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
        """The rows of one chunk, as a view."""
        return (whole.view(-1) if self.is_flat else whole)[slice(*span)]


class Cut(NamedTuple):
    """Tensors and rows along which a request can be cut.

    Attributes:
        names: As in `Chunks`, like `rows` and `is_flat`.
        rows: Number of rows.
        is_flat: Whether each element is a row.
        largest_bytes: Bytes of the largest tensor that is cut.
    """

    names: tuple[str, ...]
    rows: int
    is_flat: bool
    largest_bytes: int


def cut_of(launch: LaunchSpec, least_bytes: int) -> Cut | None:
    """Returns how a lone request can be cut; None for one of fewer bytes on the host, or without rows of its own."""
    sources = {name: pieces[0] for name, (pieces, _) in launch.concatenated.items()}
    outs = [places[0] for places, _ in launch.outputs]
    if launch.count != 1 or not outs or any(source.fortran for source in sources.values()):
        return None
    if sum(place.type.nbytes for place in (*sources.values(), *outs)) < least_bytes:
        return None
    types = {name: source.type for name, source in sources.items()}
    types |= {name: TensorType(dtype_name(one.dtype), tuple(one.shape)) for name, one in launch.resident.items()}
    chunking = launch.op.chunking(types, launch.options, [out.type for out in outs])
    if chunking is None:
        return None
    kinds = [types[name] for name in chunking.inputs] + [out.type for out in outs]
    rows = kinds[0].num_elements if chunking.is_flat else kinds[0].shape[0]
    return Cut(chunking.inputs, rows, chunking.is_flat, max(kind.nbytes for kind in kinds))
