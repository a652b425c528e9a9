"""Merge of the best elements of several parts, with torch on either device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results
from tilewire.service.ops.merge import MergeOptions


class EngineMerge(EngineOp[MergeOptions]):
    """Merge of candidates on the CPU and on the GPU; candidates are few."""

    def cpu(self, inputs: Operands, options: MergeOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        return merge(inputs["values"], inputs["indices"], options)

    def gpu(self, call: KernelCall[MergeOptions]) -> None:
        results = merge(call.inputs["values"], call.inputs["indices"], call.options)
        for out, result in zip(call.outs, results, strict=True):
            out.copy_(result)

    def prepare(self, call: KernelCall[MergeOptions]) -> Compute:
        raise ValueError("a merge takes several launches")


def merge(values: torch.Tensor, indices: torch.Tensor, options: MergeOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the best candidates of each row: those of earlier parts among equals, whose indices are smaller.

    Args:
        values: (…, candidates) values of any float dtype, those of each part best first.
        indices: (…, candidates) int64 indices in the part.
        options: Order, and the candidates of each part.

    Returns:
        (…, k) values and (…, k) int64 indices in the whole.
    """
    begins = _begins_of(options.parts, indices.device)
    is_nan = values.isnan()
    is_nan_first = options.is_nan_large and options.largest
    # NaN is ordered by a sort of its own: sorts of GPUs compare bits, and infinities are numbers that rank before it.
    order = values.masked_fill(is_nan, 0).argsort(dim=-1, descending=options.largest, stable=True)
    is_later = is_nan.gather(-1, order) != is_nan_first
    order = order.gather(-1, is_later.to(torch.uint8).argsort(dim=-1, stable=True))[..., : options.k]
    return values.gather(-1, order), (indices + begins).gather(-1, order)


@functools.lru_cache(maxsize=256)
def _begins_of(parts: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Index of the first element of each candidate's part: int64 (candidates,)."""
    counts = torch.tensor([count for count, _ in parts])
    return torch.tensor([begin for _, begin in parts]).repeat_interleave(counts).to(device)
