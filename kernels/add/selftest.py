"""The self-test of add: each binary once, on small whole numbers."""

from __future__ import annotations

import torch

from tilewire.kernels.add.op import prepare
from tilewire.kernels.build.operands import numbers
from tilewire.kernels.op import SelfTest
from tilewire.kernels.runtime.elementwise import Config, Specialization


def self_test(specialization: Specialization, config: Config, device: torch.device) -> SelfTest:
    """Launches one binary and checks it."""
    dtype = getattr(torch, specialization.dtype)
    other = torch.float16 if specialization.dtype == "float32" else torch.float32
    n = 2 * config.block_n if specialization.is_aligned else 2 * config.block_n - 1
    shape = {0: (n,), 1: (5, n), 3: (2, 3, n)}[specialization.outer_rank]
    values = numbers(shape, device)
    a, b = (_strided(values, inner, dtype, is_aligned=specialization.is_aligned) for inner in specialization.inner[:2])
    out = _strided(
        values,
        specialization.inner[2],
        dtype if specialization.is_typed else other,
        is_aligned=specialization.is_aligned,
    )
    launch = prepare(a, b, out, alpha=2, config=config)
    launch(a, b, out)
    return SelfTest(launch.variants, (out.float() == a.float() + 2 * b.float()).all())


def _strided(values: torch.Tensor, inner: str, dtype: torch.dtype, *, is_aligned: bool) -> torch.Tensor:
    """`values`, or its first column, with rows that do not follow one another and a last stride as `inner` says."""
    pad = 16 if is_aligned else 1
    if inner == "repeat":
        return _padded(values[..., :1], 16, dtype)
    if inner == "any":
        wide = _padded(values.repeat_interleave(2, dim=-1), pad, dtype)
        return wide[..., ::2]
    return _padded(values, pad, dtype)


def _padded(values: torch.Tensor, pad: int, dtype: torch.dtype) -> torch.Tensor:
    *outer, n = values.shape
    # The middle dimension has padding of its own, so that no two of them merge.
    outer = [*outer[:-1], outer[-1] + 1] if len(outer) > 1 else outer
    storage = torch.empty((*outer, -(-n // 16) * 16 + pad), dtype=dtype, device=values.device)
    if len(outer) > 1:
        storage = storage[..., :-1, :]
    shift = pad % 16
    return storage[..., shift : shift + n].copy_(values)
