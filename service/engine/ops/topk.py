"""The k largest or smallest: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewire.service.engine.ops.op import Compute, EngineOp, KernelCall, Operands, Results
from tilewire.service.engine.ops.ranking import best
from tilewire.service.ops.topk import TopkOptions


class EngineTopk(EngineOp[TopkOptions]):
    """Selection of the k largest or smallest on the CPU and on the GPU."""

    def cpu(self, inputs: Operands, options: TopkOptions, out_dtypes: Sequence[torch.dtype]) -> Results:
        assert options.k is not None, "This is a bug: planned without k."
        return best(inputs["x"], options.k, largest=options.largest, is_nan_large=True, axis=options.axis)

    def prepare(self, call: KernelCall[TopkOptions]) -> Compute:
        """Binds a launch. A row does not depend on the others of its batch."""
        kernels, inputs, options, (values, indices), _ = call
        if values.shape[options.axis] > kernels.MAX_TOPK:
            return lambda given: _sort(given["x"], options, values, indices)
        topk = kernels.prepare_topk(inputs["x"], values, indices, axis=options.axis, largest=options.largest)
        return lambda given: topk(given["x"], values, indices)


def _sort(x: torch.Tensor, options: TopkOptions, values: torch.Tensor, indices: torch.Tensor) -> None:
    """Sorts the whole axis, for more elements than the kernels choose."""
    # The sort of a GPU compares bits: a NaN whose sign is set would be the smallest.
    keys = torch.where(x.isnan(), torch.nan, x)
    order = keys.sort(dim=options.axis, descending=options.largest, stable=True).indices
    indices.copy_(order.narrow(options.axis, 0, values.shape[options.axis]))
    values.copy_(x.gather(options.axis, indices))
