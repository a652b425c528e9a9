"""Operands of a batch from their slots to the device, and results back: one launch each way for many, a DMA copy for one.

Owns the choice between the copy engine and the gather kernel, and the padding of rows to 16 bytes, which lets unaligned
products take the fast kernels. Knows no stream's meaning: the caller says which stream is current. Runs in the engine's loop
thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.staging.op import copy_stretches, word_bytes
from service.engine.backends.contract import HostBytes
from service.engine.backends.host import TORCH_DTYPES, bytes_of, shaped

# Rows on the device begin on 16 bytes: what vector loads and tensor descriptors ask for.
ROW_ALIGN = 16


class Staging:
    """Moves tensors between registered segments and one device.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: set[int] = set()

    def add_mapped(self, mapped: torch.Tensor) -> None:
        """A segment that the device can address: kernels may read and write it."""
        self._mapped.add(mapped.data_ptr())

    def remove_mapped(self, mapped: torch.Tensor) -> None:
        """Undoes `add_mapped`."""
        self._mapped.discard(mapped.data_ptr())

    def gather(self, sources: Sequence[HostBytes], shape: tuple[int, ...], held: list[torch.Tensor]) -> torch.Tensor:
        """Places operands one after another on the device, on the current stream.

        Args:
            sources: Of one dtype.
            shape: Of the whole.
            held: Gets every tensor that must live until the copies have run.

        Returns:
            The whole; its rows are padded to 16 bytes where that changes anything.
        """
        first = sources[0]
        row_bytes = shape[-1] * TORCH_DTYPES[first.type.dtype].itemsize if shape else 0
        must_pad = len(shape) == 2 and shape[0] > 1 and row_bytes % ROW_ALIGN != 0 and not first.fortran
        can_address = all(source.mapped.data_ptr() in self._mapped for source in sources)
        if can_address and (must_pad or len(sources) > 1):
            return self._gather_by_kernel(sources, shape, held, must_pad=must_pad)
        return self._gather_by_copies(sources, shape, held)

    def scatter(self, result: torch.Tensor, outs: Sequence[HostBytes], held: list[torch.Tensor]) -> None:
        """Sends a result to its slots, piece after piece, on the current stream.

        Args:
            result: Contiguous, or two-dimensional with padded rows.
            outs: Of its dtype; their elements add up to its own.
            held: Gets every tensor that must live until the copies have run.
        """
        held.append(result)
        can_address = all(out.mapped.data_ptr() in self._mapped for out in outs)
        if can_address and (len(outs) > 1 or not result.is_contiguous()):
            self._scatter_by_kernel(result, outs, held)
            return
        flat = result.reshape(-1).view(torch.uint8)
        held.append(flat)
        for piece, out in zip(flat.split([out.type.nbytes for out in outs]), outs, strict=True):
            bytes_of(out).copy_(piece, non_blocking=True)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor for a result: contiguous, or with padded rows where they would not begin on 16 bytes."""
        row_bytes = shape[-1] * dtype.itemsize if shape else 0
        if len(shape) != 2 or shape[0] < 2 or row_bytes % ROW_ALIGN == 0:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return torch.empty((shape[0], _padded(row_bytes) // dtype.itemsize), dtype=dtype, device=self._device)[
            :, : shape[1]
        ]

    def _gather_by_copies(
        self, sources: Sequence[HostBytes], shape: tuple[int, ...], held: list[torch.Tensor]
    ) -> torch.Tensor:
        total = sum(source.type.nbytes for source in sources)
        flat = torch.empty(total, dtype=torch.uint8, device=self._device)
        for piece, source in zip(flat.split([source.type.nbytes for source in sources]), sources, strict=True):
            piece.copy_(bytes_of(source), non_blocking=True)
        held.append(flat)
        if len(sources) == 1:
            return shaped(flat, sources[0])
        return flat.view(TORCH_DTYPES[sources[0].type.dtype]).view(shape)

    def _gather_by_kernel(
        self, sources: Sequence[HostBytes], shape: tuple[int, ...], held: list[torch.Tensor], *, must_pad: bool
    ) -> torch.Tensor:
        dtype = TORCH_DTYPES[sources[0].type.dtype]
        whole = self.empty(shape, dtype) if must_pad else torch.empty(shape, dtype=dtype, device=self._device)
        row = shape[-1] * dtype.itemsize
        pitch = whole.stride(0) * dtype.itemsize if must_pad else row
        rows, start = [], whole.data_ptr()
        for source in sources:
            nbytes = source.type.nbytes
            rows.append((source.mapped.data_ptr() + source.offset, start, nbytes))
            start += nbytes // row * pitch if must_pad else nbytes
        self._copy(rows, row if must_pad else 0, row, pitch, held)
        held.append(whole)
        return whole

    def _scatter_by_kernel(self, result: torch.Tensor, outs: Sequence[HostBytes], held: list[torch.Tensor]) -> None:
        is_padded = not result.is_contiguous()
        row = result.shape[-1] * result.itemsize
        pitch = result.stride(0) * result.itemsize if is_padded else row
        rows, start = [], result.data_ptr()
        for out in outs:
            nbytes = out.type.nbytes
            rows.append((start, out.mapped.data_ptr() + out.offset, nbytes))
            start += nbytes // row * pitch if is_padded else nbytes
        self._copy(rows, row if is_padded else 0, pitch, row, held)

    def _copy(
        self, rows: list[tuple[int, int, int]], row: int, pitch_from: int, pitch_to: int, held: list[torch.Tensor]
    ) -> None:
        """Launches the copy of (source, destination, bytes) stretches; `row` is 0 when no side is padded."""
        alignment = (pitch_from | pitch_to | row) if row else 0
        for source, destination, nbytes in rows:
            alignment |= source | destination | nbytes
        word = word_bytes(alignment)
        table = torch.tensor(rows, dtype=torch.int64)
        table[:, 2] //= word
        # The kernel reads the table over the bus: pinned, and held until the batch is over.
        pinned = torch.empty(table.shape, dtype=torch.int64, pin_memory=True).copy_(table)
        held.append(pinned)
        copy_stretches(
            pinned,
            max(nbytes for _, _, nbytes in rows) // word,
            word,
            row_words=row // word,
            pitch_from=pitch_from // word,
            pitch_to=pitch_to // word,
            device=self._device,
        )


def _padded(row_bytes: int) -> int:
    return -(-row_bytes // ROW_ALIGN) * ROW_ALIGN
