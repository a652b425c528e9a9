"""Operands of a batch from their slots to the device, and results back: one launch each way, or DMA copies for large operands.

Owns the choice between the copy engine and the copying kernel, and the padding of rows (`row_step`). The padding lets
unaligned products take the fast kernels. The caller sets the current stream. Runs in the engine's loop thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewire.kernels.copy.op import CopyRange, copy_ranges
from tilewire.kernels.runtime.layouts import ROW_BYTES, row_step
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.gpu.pinning import spans_of
from tilewire.service.engine.backends.host import TORCH_DTYPES, shaped, tensor_of

# From here an operand goes by the copy engine even beside others. The copying kernel saves calls, of which there are
# few, and takes multiprocessors from the batch that computes. The driver moves copies of this size from pinned memory
# by DMA.
LARGE_BYTES = 4 * 2**20


class Staging:
    """Moves tensors between registered segments and one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._mapped: set[int] = set()

    def add_mapped(self, mapped: torch.Tensor) -> None:
        """A segment that the device can address: kernels may read and write it."""
        self._mapped.add(mapped.data_ptr())

    def remove_mapped(self, mapped: torch.Tensor) -> bool:
        """Undoes `add_mapped`; whether there was anything to undo."""
        was_there = mapped.data_ptr() in self._mapped
        self._mapped.discard(mapped.data_ptr())
        return was_there

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, can_pad: bool) -> torch.Tensor:
        """A tensor on the device: contiguous, or with padded rows where it may and they would not begin on 16 bytes."""
        if not (can_pad and _must_pad(shape, dtype)):
            return torch.empty(shape, dtype=dtype, device=self.device)
        step = row_step(shape[1], dtype.itemsize)
        return torch.empty((shape[0], step), dtype=dtype, device=self.device)[:, : shape[1]]

    def gather(
        self,
        operands: Sequence[tuple[Sequence[HostBytes], tuple[int, ...]]],
        held: list[torch.Tensor],
        *,
        can_pad: bool,
    ) -> list[torch.Tensor]:
        """Places the operands of a batch on the device, on the current stream.

        Args:
            operands: Each a whole: its pieces, to be placed one after another, and its shape.
            held: Gets every tensor that must live until the copies have run.
            can_pad: The op gains from rows that begin on 16 bytes.

        Returns:
            The wholes; their rows are padded where they would not begin on 16 bytes.
        """
        pieces = [piece for sources, _ in operands for piece in sources]
        must_pad = can_pad and any(_must_pad(shape, TORCH_DTYPES[one[0].type.dtype]) for one, shape in operands)
        if (_is_few(pieces) and not must_pad) or not self.can_address(pieces):
            return [self._by_copies(sources, shape, held) for sources, shape in operands]
        wholes, ranges = [], []
        for sources, shape in operands:
            whole = self._whole(sources, shape, can_pad)
            flat = sources[0].fortran or whole.is_contiguous()
            ranges += ranges_of(whole, sources, is_padded=not flat, is_gather=True)
            wholes.append(whole)
        self.copy(ranges, held)
        held += wholes
        return wholes

    def scatter(self, results: Sequence[tuple[torch.Tensor, Sequence[HostBytes]]], held: list[torch.Tensor]) -> None:
        """Sends results to their slots, piece after piece, on the current stream.

        Args:
            results: Each contiguous, or two-dimensional with padded rows; and its slots, whose elements add up to its own.
                Rows of a slot may have a pitch: torch has no asynchronous copy to those, the copying kernel has.
            held: Gets every tensor that must live until the copies have run.
        """
        held += [result for result, _ in results]
        slots = [slot for _, outs in results for slot in outs]
        has_pitch = any(slot.pitch for slot in slots)
        is_plain = _is_few(slots) and not has_pitch and all(result.is_contiguous() for result, _ in results)
        if not is_plain and self.can_address(slots):
            ranges = []
            for result, outs in results:
                ranges += ranges_of(result, outs, is_padded=not result.is_contiguous(), is_gather=False)
            self.copy(ranges, held)
            return
        ranges = []
        for result, outs in results:
            if has_pitch:
                # A segment that the driver could not pin. It waits for each copy.
                pieces = result.reshape(-1).split([out.type.num_elements for out in outs])
                for piece, out in zip(pieces, outs, strict=True):
                    tensor_of(out).copy_(piece.view(out.type.shape))
                continue
            flat = result.reshape(-1).view(torch.uint8)
            held.append(flat)
            for piece, out in zip(flat.split([out.type.nbytes for out in outs]), outs, strict=True):
                ranges += move(piece, out, is_gather=False)
        self.copy(ranges, held)

    def can_address(self, places: Sequence[HostBytes]) -> bool:
        """Whether kernels may read and write all of these places."""
        return all(segment.data_ptr() in self._mapped for segment in segments_of(places).values())

    def begin_whole(self, source: HostBytes, held: list[torch.Tensor], *, is_chunked: bool) -> torch.Tensor:
        """Takes memory for an operand that is chunked, or copies one that is not, on the current stream. Pads no rows."""
        if is_chunked:
            return shaped(torch.empty(source.type.nbytes, dtype=torch.uint8, device=self.device), source)
        return self._by_copies((source,), source.type.shape, held)

    def _whole(self, sources: Sequence[HostBytes], shape: tuple[int, ...], can_pad: bool) -> torch.Tensor:
        first = sources[0]
        dtype = TORCH_DTYPES[first.type.dtype]
        if first.fortran:
            return shaped(torch.empty(first.type.nbytes, dtype=torch.uint8, device=self.device), first)
        return self.empty(shape, dtype, can_pad=can_pad)

    def _by_copies(
        self, sources: Sequence[HostBytes], shape: tuple[int, ...], held: list[torch.Tensor]
    ) -> torch.Tensor:
        sizes = [source.type.nbytes for source in sources]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        ranges = []
        for piece, source in zip(flat.split(sizes), sources, strict=True):
            ranges += move(piece, source, is_gather=True)
        self.copy(ranges, held)
        held.append(flat)
        if len(sources) == 1:
            return shaped(flat, sources[0])
        return flat.view(TORCH_DTYPES[sources[0].type.dtype]).view(shape)

    def copy(self, ranges: Sequence[CopyRange], held: list[torch.Tensor]) -> None:
        """Copies ranges of memory in one launch, on the current stream; `held` gets their table."""
        table = copy_ranges(ranges, self.device)
        if table is not None:
            held.append(table)


def _is_few(places: Sequence[HostBytes]) -> bool:
    """Whether a copy call for each costs less than the kernel that would copy them all."""
    return len(places) == 1 or all(place.type.nbytes >= LARGE_BYTES for place in places)


def move(device: torch.Tensor, place: HostBytes, *, is_gather: bool, skipped: int = 0) -> list[CopyRange]:
    """Queues copies between flat bytes on the device and those of a place, by the copy engine, on the current stream.

    Args:
        device: uint8 (n,).
        place: On the host; its rows have no pitch.
        is_gather: To the device; else from it.
        skipped: Bytes of the place before the n that are copied.

    Returns:
        Copies that are left for a kernel: the small ones of a region. The driver might do them with the CPU, which must not
        touch a region.
    """
    assert not place.pitch, "This is a bug: the rows do not follow one another."
    ranges, first = [], place.offset + skipped
    for begin, end in spans_of(first, device.numel()):
        # Most copies lie in one piece.
        here = device if end - begin == device.numel() else device[begin:end]
        there = place.mapped[first + begin : first + end]
        if place.is_foreign and end - begin < LARGE_BYTES:
            ends = (there, here) if is_gather else (here, there)
            ranges.append(CopyRange(ends[0].data_ptr(), ends[1].data_ptr(), end - begin))
        elif is_gather:
            here.copy_(there, non_blocking=True)
        else:
            there.copy_(here, non_blocking=True)
    return ranges


def _must_pad(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    # One column is read and written as one row.
    return len(shape) == 2 and min(shape) > 1 and shape[1] * dtype.itemsize % ROW_BYTES != 0


def segments_of(places: Sequence[HostBytes]) -> dict[int, torch.Tensor]:
    """Returns the segments of places by identity: there may be hundreds of places, in few segments, most beside their like."""
    segments: dict[int, torch.Tensor] = {}
    segment = None
    for place in places:
        if place.mapped is not segment:
            segment = segments[id(place.mapped)] = place.mapped
    return segments


def ranges_of(whole: torch.Tensor, places: Sequence[HostBytes], *, is_padded: bool, is_gather: bool) -> list[CopyRange]:
    """The copies between a tensor on the device and its pieces on the host, in order.

    Args:
        whole: On the device.
        places: Pieces of the operand.
        is_padded: Rows of `whole` do not follow one another. Those of the places may have a pitch.
        is_gather: To the device; else from it.
    """
    # All places of a launch are of one form.
    has_rows = is_padded or places[0].pitch > 0
    row = whole.shape[-1] * whole.itemsize if has_rows else 0
    pitch = whole.stride(0) * whole.itemsize if is_padded else row
    host_pitch = places[0].pitch or row
    ranges = []
    address = whole.data_ptr()
    segment, base, kind, nbytes = None, 0, None, 0
    for place in places:
        # Most pieces are of one segment and of one kind, and there may be hundreds.
        if place.mapped is not segment:
            segment, base = place.mapped, place.mapped.data_ptr()
        if place.type is not kind:
            kind, nbytes = place.type, place.type.nbytes
        host = base + place.offset
        if is_gather:
            ranges.append(CopyRange(host, address, nbytes, row, host_pitch, pitch))
        else:
            ranges.append(CopyRange(address, host, nbytes, row, pitch, host_pitch))
        address += nbytes // row * pitch if row else nbytes
    return ranges
