"""The self-test of pointwise: each binary once, on small whole numbers."""

from __future__ import annotations

import torch

from tilewire.kernels.build.operands import numbers
from tilewire.kernels.op import SelfTest
from tilewire.kernels.pointwise.op import prepare
from tilewire.kernels.runtime.elementwise import Config, Specialization


def self_test(specialization: Specialization, config: Config, device: torch.device) -> SelfTest:
    """Launches one binary and checks it."""
    dtype = getattr(torch, specialization.dtype)
    other = torch.float16 if specialization.dtype == "float32" else torch.float32
    n = 2 * config.block_n - (0 if specialization.is_aligned else 1)
    shape = (n,) if specialization.outer_rank == 0 else (2, config.block_rows + 1, n)
    values = numbers(shape, device)
    shift = 0 if specialization.is_aligned else 1
    x, y, out = (
        _lying(values, inner, dtype, is_padded=specialization.outer_rank > 0, shift=shift)
        for inner in specialization.inner
    )
    if not specialization.is_typed:
        out = _lying(values, specialization.inner[2], other, is_padded=specialization.outer_rank > 0, shift=shift)
    out.fill_(float("nan"))
    second = y if specialization.is_binary else None
    prepared = prepare(x, second, out, "mul" if specialization.is_binary else "neg", 2.0, 1.0, config)
    prepared(x, second, out)
    expected = (x.float() * y.float() if specialization.is_binary else -x.float()) * 2 + 1
    return SelfTest(prepared.variants, (out.float() == expected).all())


def _lying(values: torch.Tensor, inner: str, dtype: torch.dtype, *, is_padded: bool, shift: int) -> torch.Tensor:
    """A copy of `values`, or of its first column, whose last dimension goes as `inner` says, `shift` elements into memory."""
    *outer, n = values.shape
    if inner == "repeat":
        n, values = 1, values[..., :1]
    step = 2 if inner == "any" else 1
    pad = 16 if is_padded else 0
    length = shift + step * n
    storage = torch.empty(
        (*outer, length + pad + (-length % 16 if is_padded else 0)), dtype=dtype, device=values.device
    )
    return storage[..., shift:length:step].copy_(values)
