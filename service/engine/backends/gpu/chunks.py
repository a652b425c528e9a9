"""Large requests in parts: while the rows of one part compute, those of the next come in and those of the one before go out.

The bus works both ways at once, so a large request takes little more than its operands' way in. Here is what can be parted, and
how; the copies and launches are the backend's. Pure: types in, rows out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewire.service.dtypes import DTYPES
from tilewire.service.engine.backends.contract import HostBytes, Joined
from tilewire.service.ops.registry import AddOptions, MatmulOptions

# A part this large moves at the bus's full rate, and a product of its rows fills a GPU.
PART_BYTES = 8 * 2**20
MOST_PARTS = 8
# Parts begin at multiples of this many rows: the largest tile, and 16 bytes of anything.
ROWS_STEP = 256


@dataclass(frozen=True, slots=True)
class Parts:
    """How a request is parted.

    Attributes:
        names: Inputs of which each part needs only its rows; the others come whole, first.
        rows: Of those inputs, and of the result.
        step: Rows of a part; the last may have fewer.
        is_flat: The op knows no rows: each element is one.
    """

    names: tuple[str, ...]
    rows: int
    step: int
    is_flat: bool = False

    def spans(self) -> list[tuple[int, int]]:
        """First row and end of each part."""
        return [(begin, min(begin + self.step, self.rows)) for begin in range(0, self.rows, self.step)]


def parts_of(launch: Joined) -> Parts | None:
    """How to part a launch, or None for one that is not worth it or has no rows of its own.

    Args:
        launch: Of a batch that has no other.
    """
    names = _names(launch)
    if not names or len(launch.outs) != 1:
        return None
    pieces = [launch.gathered[name][0][0] for name in names] + [launch.outs[0]]
    is_flat = isinstance(launch.options, AddOptions)
    rows = pieces[0].type.num_elements if is_flat else pieces[0].type.shape[0]
    largest = max(piece.type.nbytes for piece in pieces)
    count = min(MOST_PARTS, largest // PART_BYTES, rows // ROWS_STEP)
    everything = [source for (source,), _ in launch.gathered.values()] + [launch.outs[0]]
    if count < 2 or not (is_flat or all(_has_aligned_rows(piece) for piece in everything)):
        return None
    step = -(-rows // (count * ROWS_STEP)) * ROWS_STEP
    return Parts(names, rows, step, is_flat) if step < rows else None


def _names(launch: Joined) -> tuple[str, ...]:
    """The inputs that have the result's rows, all of one request; none where another would need its rows, too."""
    options, gathered = launch.options, launch.gathered
    if any(len(sources) != 1 or sources[0].fortran for sources, _ in gathered.values()):
        return ()
    if isinstance(options, MatmulOptions):
        is_plain = "a" in gathered and len(gathered["a"][1]) == len(launch.out_shape) == 2
        is_scaled = "a_scale" in gathered or "a_scale" in launch.shared
        return ("a",) if is_plain and not options.transpose_a and not is_scaled else ()
    if isinstance(options, AddOptions):
        shapes = [shape for _, shape in gathered.values()]
        return ("a", "b") if shapes == [launch.out_shape] * 2 else ()
    is_plain = "x" in gathered and len(launch.out_shape) == 2 and options.axis in (-1, 1)
    return ("x",) if is_plain else ()


def _has_aligned_rows(piece: HostBytes) -> bool:
    """Whether its rows, if it has several, begin at multiples of 16 bytes, so that none is padded."""
    kind = piece.type
    return len(kind.shape) < 2 or kind.shape[-1] * DTYPES[kind.dtype].itemsize % 16 == 0
