"""The k largest or smallest: torch on the CPU, Tilewire's kernels on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewire.service.engine.ops.op import Compute, EngineOp, Operands
from tilewire.service.ops.topk import TopkOptions

# Beyond it the kernels' sorting networks no longer fit a program; a whole sort then costs little more.
MAX_KERNEL_K = 1024


class EngineTopk(EngineOp[TopkOptions]):
    """See `service.ops.topk`."""

    name = "topk"
    pads_rows = False

    def cpu(
        self, inputs: Operands, options: TopkOptions, out_dtypes: Sequence[torch.dtype]
    ) -> tuple[torch.Tensor, ...]:
        """See `EngineOp.cpu`. A stable sort gives the smaller index among equals, and NaN above every number."""
        del out_dtypes
        return _sorted(inputs["x"], options)

    def prepare(
        self,
        kernels: Any,
        inputs: Operands,
        options: TopkOptions,
        outs: Sequence[torch.Tensor],
        *,
        batch_invariant: bool,
    ) -> Compute:
        """See `EngineOp.prepare`. A row does not depend on what it is batched with."""
        del batch_invariant
        values, indices = outs
        assert options.k is not None, "This is a bug: planned without k."
        if options.k > MAX_KERNEL_K:
            return lambda given: _sort_into(given["x"], options, values, indices)
        topk = kernels.prepare_topk(inputs["x"], values, indices, axis=options.axis, largest=options.largest)
        return lambda given: topk(given["x"], values, indices)


def _sorted(x: torch.Tensor, options: TopkOptions) -> tuple[torch.Tensor, torch.Tensor]:
    assert options.k is not None, "This is a bug: planned without k."
    values, indices = x.sort(dim=options.axis, descending=options.largest, stable=True)
    return values.narrow(options.axis, 0, options.k), indices.narrow(options.axis, 0, options.k)


def _sort_into(x: torch.Tensor, options: TopkOptions, values: torch.Tensor, indices: torch.Tensor) -> None:
    best, where = _sorted(x, options)
    values.copy_(best)
    indices.copy_(where)
