"""The self-test of softmax: each binary once, on rows of up to eight equal elements."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tilewire.kernels.build.operands import lay, like
from tilewire.kernels.op import SelfTest
from tilewire.kernels.softmax.configs import Config, Problem
from tilewire.kernels.softmax.op import prepare


def self_test(problem: Problem, config: Config, device: torch.device) -> SelfTest:
    """Launches the binaries of one configuration and checks them."""
    splits = max(2, config.splits) if config.kernel == "split" else config.splits
    config = replace(config, splits=splits)
    n = 40 if config.kernel == "column" else config.held_n * splits
    x = torch.full((3, n if problem.is_aligned else n - 1), -torch.inf, device=device)
    # A power of two, so that the quotient is exact.
    equal = 1 << (min(8, x.shape[1]).bit_length() - 1)
    x[:, -equal:] = 0
    contiguous = "last" if problem.is_contiguous else "first"
    laid = lay(x, contiguous, getattr(torch, problem.dtype), is_aligned=problem.is_aligned)
    out = like(x, contiguous, getattr(torch, problem.out_dtype), is_aligned=problem.is_aligned)
    plain, logarithm = (prepare(laid, out, log=log, config=config) for log in (False, True))
    out.fill_(-1)
    plain(laid, out)
    is_right = _is_plain(out.float(), x, equal)
    out.fill_(-1)
    logarithm(laid, out)
    return SelfTest(plain.variants, is_right & _is_log(out.float(), x, equal))


def _is_plain(out: torch.Tensor, x: torch.Tensor, equal: int) -> torch.Tensor:
    return (out == torch.exp(x) / equal).all()


def _is_log(out: torch.Tensor, x: torch.Tensor, equal: int) -> torch.Tensor:
    # The driver's logarithm is off in its last bits.
    return (((out - (x - math.log(equal))).abs() < 0.02) | (torch.isinf(x) & (out == x))).all()
