"""Merge of the best elements of several parts: what `search` and `topk` of a sharded resident end with. No client names it."""

from __future__ import annotations

from collections.abc import Sequence

from tilewire.service.dtypes import DTYPES
from tilewire.service.ops.op import Batching, JoinStrategy, Op, OpOptions, TensorType, Types, Work

MERGE = "merge"


class MergeOptions(OpOptions, frozen=True, tag=MERGE):
    """Options of `merge`.

    Attributes:
        is_nan_large: Whether NaN counts as the largest; else it comes last.
        parts: Number of candidates of each part, in the order of the parts, and the index of the part's first element.
    """

    k: int
    largest: bool
    is_nan_large: bool
    parts: tuple[tuple[int, int], ...]


class Merge(Op[MergeOptions]):
    """values, indices = the k best of the candidates in each row; among equals the one that comes first."""

    name = MERGE
    summary = "values, indices = the k best candidates of each row, with their indices in the whole."
    required = ("values", "indices")
    outputs = ("values", "indices")
    dtypes = tuple(DTYPES)
    options = MergeOptions

    def infer(self, types: Types, options: MergeOptions) -> tuple[tuple[TensorType, ...], int]:
        values = types["values"]
        shape = (*values.shape[:-1], options.k)
        return (TensorType(values.dtype, shape), TensorType("int64", shape)), values.num_elements

    def batching(
        self, types: Types, residents: frozenset[str], options: MergeOptions, outputs: Sequence[TensorType]
    ) -> Batching[MergeOptions] | None:
        """Rows of equal parts."""
        values = types["values"]
        return Batching(JoinStrategy.ROWS, (options, values.dtype), options) if values.num_elements else None

    def work(
        self, types: Types, residents: frozenset[str], options: MergeOptions, flops: int, moved_bytes: int
    ) -> tuple[Work, ...]:
        """Counts nothing: the parts are counted under their op."""
        return ()
