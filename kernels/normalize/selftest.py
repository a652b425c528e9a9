"""The self-test of normalize: each binary once."""

from __future__ import annotations

import torch

from tilewire.kernels.build.operands import numbers
from tilewire.kernels.normalize.configs import Config, Problem
from tilewire.kernels.normalize.op import prepare
from tilewire.kernels.normalize.reference import normalize_reference
from tilewire.kernels.op import SelfTest

_EPS = 1e-5


def self_test(problem: Problem, config: Config, device: torch.device) -> SelfTest:
    """Launches one binary and checks it."""
    n = config.block_n * (1 if config.block_rows else 2) - (0 if problem.is_aligned else 1)
    rows = config.block_rows + 2
    dtype, out_dtype, vector_dtype = (
        getattr(torch, name) for name in (problem.dtype, problem.out_dtype, problem.vector_dtype)
    )
    x = numbers((rows, n), device).to(dtype)
    weight, bias = (numbers((n,), device).add(shift).to(vector_dtype) for shift in (0, 1))
    out = torch.full((rows, n), float("nan"), dtype=out_dtype, device=device)
    prepared = prepare(x, out, "layer", _EPS, weight, bias, 1, config)
    prepared(x, weight, bias, out)
    expected = normalize_reference(x, "layer", _EPS, weight=weight, bias=bias)
    # A unit of the output's type, which Triton's interpreter cuts off instead of rounding, and float32's own error.
    bound = expected.abs() * torch.finfo(out_dtype).eps + 1e-4
    return SelfTest(prepared.variants, ((out.double() - expected).abs() <= bound).all())
