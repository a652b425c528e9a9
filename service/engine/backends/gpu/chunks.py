"""Large requests in chunks: while the rows of one compute, those of the next come in and those of the one before go out.

The bus works both ways at once, so a large request takes little more than its operands' way in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewire import kernels
from tilewire.service.dtypes import DTYPES
from tilewire.service.engine.backends.chunks import Chunks, cut_of
from tilewire.service.engine.backends.contract import HostBytes, LaunchSpec
from tilewire.service.engine.backends.gpu.pipeline import Around, InFlight, Pipeline
from tilewire.service.engine.backends.gpu.single import empty_outputs
from tilewire.service.engine.backends.gpu.staging import Staging, move
from tilewire.service.engine.ops.op import KernelCall, Operands
from tilewire.service.engine.ops.registry import ENGINE_OPS
from tilewire.service.ops.op import TensorType

# A chunk this large moves at the bus's full rate, and a product of its rows fills a GPU.
CHUNK_BYTES = 8 * 2**20
MAX_CHUNKS = 8
# Chunks begin at multiples of this many rows: the largest tile, and 16 bytes of anything.
ROWS_STEP = 256


def chunks_of(launch: LaunchSpec) -> Chunks | None:
    """Returns how to cut a launch, or None for one that is not worth it or has no rows of its own."""
    cut = cut_of(launch, 2 * CHUNK_BYTES)
    if cut is None or not launch.concatenated.keys() >= set(cut.names):
        return None
    if launch.op.is_elementwise and not cut.is_flat:
        # Operands that repeat are whole.
        return None
    count = min(MAX_CHUNKS, cut.largest_bytes // CHUNK_BYTES, cut.rows // ROWS_STEP)
    pieces = [pieces[0] for pieces, _ in (*launch.concatenated.values(), *launch.outputs)]
    if count < 2 or not (cut.is_flat or all(map(_has_aligned_rows, pieces))):
        return None
    step = -(-cut.rows // (count * ROWS_STEP)) * ROWS_STEP
    return Chunks(cut.names, cut.rows, step, cut.is_flat) if step < cut.rows else None


def _has_aligned_rows(piece: HostBytes) -> bool:
    """Whether it is a matrix whose rows begin at multiples of 16 bytes, so that none is padded, or has no rows."""
    kind = piece.type
    rank = len(kind.shape)
    return rank < 2 or (rank == 2 and kind.shape[-1] * DTYPES[kind.dtype].itemsize % 16 == 0)


class Chunked:
    """Runs one large request chunk by chunk, so that copies in, kernels and copies out overlap."""

    def __init__(self, staging: Staging, chunks: Chunks, *, is_invariant: bool) -> None:
        self._staging = staging
        self._chunks = chunks
        self._is_invariant = is_invariant

    def run(self, launches: Sequence[LaunchSpec], pipeline: Pipeline) -> InFlight:
        """Queues copies and kernels of a batch."""
        (launch,) = launches
        chunks, op = self._chunks, ENGINE_OPS[launch.op.name]
        marks, held = pipeline.marks(), [*launch.resident.values()]
        pipeline.use(pipeline.compute)
        outs = empty_outputs(launch, self._staging, can_pad=False)
        pipeline.use(pipeline.stage_in)
        marks.begin.record(pipeline.stage_in)
        wholes = {
            name: self._staging.begin_whole(sources[0], held, is_chunked=name in chunks.names)
            for name, (sources, _) in launch.concatenated.items()
        }
        held += [*outs, *wholes.values()]
        around: list[Around] = []
        for span in chunks.spans():
            cut = {name: chunks.rows_of(wholes[name], span) for name in chunks.names}
            operands = Operands({**wholes, **cut}, launch.resident)
            results = [chunks.rows_of(out, span) for out in outs]
            pipeline.use(pipeline.stage_in)
            for name in chunks.names:
                self._copy_rows(operands[name], launch.concatenated[name][0][0], span, held, is_gather=True)
            marks.staged.record(pipeline.stage_in)
            pipeline.compute.wait_event(marks.staged)
            pipeline.use(pipeline.compute)
            launched, computed = pipeline.new_event(), pipeline.new_event()
            launched.record(pipeline.compute)
            op.gpu(KernelCall(kernels, operands, launch.options, results, self._is_invariant))
            computed.record(pipeline.compute)
            around.append((launched, computed))
            pipeline.stage_out.wait_event(computed)
            pipeline.use(pipeline.stage_out)
            for result, (places, _) in zip(results, launch.outputs, strict=True):
                if places[0].pitch:
                    self._staging.scatter([(result, [_cut(places[0], span)])], held)
                else:
                    self._copy_rows(result, places[0], span, held, is_gather=False)
        marks.computed.record(pipeline.compute)
        # The last copy waits for the event of its chunk alone, and may be over before this one is.
        pipeline.stage_out.wait_event(marks.computed)
        marks.end.record(pipeline.stage_out)
        return InFlight(marks, held, pipeline, around)

    def _copy_rows(
        self, rows: torch.Tensor, place: HostBytes, span: tuple[int, int], held: list[torch.Tensor], *, is_gather: bool
    ) -> None:
        """Copies the rows of one chunk on the current stream: to the device, or from it. `place` has all rows, on the host."""
        row_bytes = place.type.nbytes // self._chunks.rows
        here = rows.reshape(-1).view(torch.uint8)
        self._staging.copy(move(here, place, is_gather=is_gather, skipped=span[0] * row_bytes), held)


def _cut(place: HostBytes, span: tuple[int, int]) -> HostBytes:
    """Rows of a place whose rows have a pitch."""
    kind = TensorType(place.type.dtype, (span[1] - span[0], *place.type.shape[1:]))
    return HostBytes(place.mapped, kind, place.offset + span[0] * place.pitch, pitch=place.pitch)
