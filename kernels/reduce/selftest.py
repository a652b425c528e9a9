"""The self-test of reduce: each binary once, on small whole numbers."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewire.kernels.build.operands import numbers
from tilewire.kernels.op import SelfTest
from tilewire.kernels.reduce.configs import Config, Problem
from tilewire.kernels.reduce.op import prepare
from tilewire.kernels.reduce.reference import reduce_reference

# A kind of each state, by its number.
_KINDS = ("sum", "argmax", "logsumexp", "max")


def self_test(problem: Problem, config: Config, device: torch.device) -> SelfTest:
    """Launches the binaries of one configuration and checks them."""
    # An aligned row ends where a piece of 16 bytes does, however short its blocks are.
    n = -(-3 * config.block_n // problem.unit) * problem.unit - (0 if problem.is_aligned else 1)
    rows = -(-config.block_rows // 16) * 16 + (16 if problem.is_aligned else 3)
    dtype = getattr(torch, problem.dtype)
    if problem.is_row:
        x, axis = numbers((rows, n), device).to(dtype), 1
    elif problem.is_unit_inner:
        x, axis = numbers((2, n, rows), device).to(dtype), 1
    else:
        x, axis = numbers((2, n, 2 * rows), device).to(dtype)[..., ::2], 1
    kind = _KINDS[problem.state]
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    out = torch.full(shape, -7, dtype=torch.int64 if kind == "argmax" else torch.float32, device=device)
    # Two programs a row, so that their states are merged.
    shared = replace(config, parts=2, steps=2)
    prepared = prepare(x, out, kind=kind, axis=axis, config=shared)
    prepared(x, out)
    expected = reduce_reference(x, kind, axis=axis)
    is_right = (out.double() - expected).abs() <= (1e-5 * expected.abs() if kind == "logsumexp" else 0.0)
    return SelfTest(prepared.variants, is_right.all())
