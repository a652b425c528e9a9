"""Small matrix products of unequal shapes, one launch: where each operand lies in one range of memory, and the tables of it.

A product of such a batch costs some arithmetic here, and no tensor, view or call of its own. Runs in the engine's loop thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tilewire.kernels.copy.op import CopyRange
from tilewire.kernels.matmul.grouped.op import MAX_GROUPS, TABLE_FIELDS, GroupKind, launch_table, tiles_of
from tilewire.kernels.runtime.layouts import ROW_BYTES, row_step
from tilewire.service.dtypes import DTYPES
from tilewire.service.engine.backends.contract import HostBytes, LaunchSpec
from tilewire.service.engine.backends.gpu.pipeline import InFlight, Pipeline
from tilewire.service.engine.backends.gpu.staging import Staging
from tilewire.service.engine.ops.op import Epilogue
from tilewire.service.engine.ops.registry import ENGINE_OPS

ITEM_BYTES = 8

# Operands and result.
Product = tuple[HostBytes, HostBytes, HostBytes]


class Sizes(NamedTuple):
    """Memory of one product: of `a`, `b` and the result.

    Attributes:
        rows: Bytes of a row; 0 where rows follow one another.
        pitches: Bytes from row to row; 0 where rows follow one another.
        steps: Elements from row to row.
        is_aligned: Whether every row begins on 16 bytes.
    """

    rows: tuple[int, ...]
    pitches: tuple[int, ...]
    nbytes: tuple[int, ...]
    steps: tuple[int, ...]
    tiles: int
    is_aligned: bool


class Grouped:
    """Runs products as `can_group` accepts them, in one launch."""

    def __init__(self, epilogue: Epilogue, staging: Staging) -> None:
        self._epilogue = epilogue
        self._staging = staging

    def run(self, launches: Sequence[LaunchSpec], pipeline: Pipeline) -> InFlight:
        """Queues copies and kernels of a batch."""
        marks, held = pipeline.marks(), list[torch.Tensor]()
        products = [_product(one) for one in launches]
        sizes = [_sizes(a.type.shape, b.type.shape[1], a.type.dtype, out.type.dtype) for a, b, out in products]
        kind = self._kind(products[0], is_aligned=all(one.is_aligned for one in sizes))
        pipeline.use(pipeline.stage_in)
        marks.begin.record(pipeline.stage_in)
        table, results = self._gather(products, sizes, held)
        marks.staged.record(pipeline.stage_in)
        pipeline.compute.wait_event(marks.staged)
        pipeline.use(pipeline.compute)
        launch_table(table, sum(one.tiles for one in sizes), kind)
        marks.computed.record(pipeline.compute)
        pipeline.stage_out.wait_event(marks.computed)
        pipeline.use(pipeline.stage_out)
        self._staging.copy(results, held)
        marks.end.record(pipeline.stage_out)
        return InFlight(marks, held, pipeline)

    def _kind(self, product: Product, *, is_aligned: bool) -> GroupKind:
        a, _, out = product
        precision = self._epilogue.precision if a.type.dtype == "float32" else "ieee"
        return GroupKind(a.type.dtype, precision, "n", is_aligned, out.type.dtype, activation=self._epilogue.activation)

    def _gather(
        self, products: Sequence[Product], sizes: Sequence[Sizes], held: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[CopyRange]]:
        """Brings operands and table onto the device, on the current stream; the memory of the results is taken there too.

        Returns:
            The table on the device, and the copies that bring the results into their slots.
        """
        device, table_bytes = self._staging.device, len(products) * TABLE_FIELDS * ITEM_BYTES
        # Behind the table, operands begin at multiples of 16 bytes.
        begin = -(-table_bytes // ROW_BYTES) * ROW_BYTES
        nbytes = begin + sum(sum(one.nbytes) for one in sizes)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        at = memory.data_ptr() + begin
        ranges: list[CopyRange] = []
        results: list[CopyRange] = []
        rows: list[int] = []
        first = 0
        for (a, b, out), one in zip(products, sizes, strict=True):
            places = (at, at + one.nbytes[0], at + one.nbytes[0] + one.nbytes[1])
            at = places[2] + one.nbytes[2]
            ranges += (
                CopyRange(_address(a), places[0], a.type.nbytes, one.rows[0], one.rows[0], one.pitches[0]),
                CopyRange(_address(b), places[1], b.type.nbytes, one.rows[1], one.rows[1], one.pitches[1]),
            )
            results.append(
                CopyRange(places[2], _address(out), out.type.nbytes, one.rows[2], one.pitches[2], one.rows[2])
            )
            m, n = out.type.shape
            rows += (*places, 0, m, n, a.type.shape[1], *one.steps, first)
            first += one.tiles
        table = torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, TABLE_FIELDS))
        if device.type != "cpu":
            table = torch.empty(table.shape, dtype=torch.int64, pin_memory=True).copy_(table)
        ranges.append(CopyRange(table.data_ptr(), memory.data_ptr(), table_bytes))
        held += [memory, table]
        self._staging.copy(ranges, held)
        return memory[:table_bytes].view(torch.int64).view(-1, TABLE_FIELDS), results


def can_group(launches: Sequence[LaunchSpec], staging: Staging) -> Epilogue | None:
    """Returns the epilogue of products of two whole matrices each, with nothing resident and nothing transposed; else None."""
    if not 1 < len(launches) <= MAX_GROUPS:
        return None
    epilogue = ENGINE_OPS[launches[0].op.name].grouped(launches[0].options)
    if epilogue is None or not all(_is_plain(one) and staging.can_address(_product(one)) for one in launches):
        return None
    return epilogue


def _is_plain(one: LaunchSpec) -> bool:
    if one.resident or len(one.concatenated) != 2 or one.count != 1:
        return False
    return all(
        not sources[0].fortran and len(shape) == 2 and 0 not in shape for sources, shape in one.concatenated.values()
    )


def _product(one: LaunchSpec) -> Product:
    a, b = one.op.required
    return one.concatenated[a][0][0], one.concatenated[b][0][0], one.outputs[0][0][0]


def _address(place: HostBytes) -> int:
    return place.mapped.data_ptr() + place.offset


@functools.lru_cache(maxsize=4096)
def _sizes(a_shape: tuple[int, int], n: int, dtype: str, out_dtype: str) -> Sizes:
    (m, k), items = a_shape, (DTYPES[dtype].itemsize, DTYPES[dtype].itemsize, DTYPES[out_dtype].itemsize)
    lengths, counts = (k, n, n), (m, k, m)
    steps = tuple(row_step(length, item) for length, item in zip(lengths, items, strict=True))
    pitches = tuple(step * item for step, item in zip(steps, items, strict=True))
    rows = tuple(length * item for length, item in zip(lengths, items, strict=True))
    unit = ROW_BYTES // items[0]
    return Sizes(
        rows=tuple(0 if row == pitch else row for row, pitch in zip(rows, pitches, strict=True)),
        pitches=tuple(0 if row == pitch else pitch for row, pitch in zip(rows, pitches, strict=True)),
        nbytes=tuple(count * pitch for count, pitch in zip(counts, pitches, strict=True)),
        steps=steps,
        tiles=tiles_of(m, n),
        is_aligned=k % unit == 0 and n % unit == 0,
    )
