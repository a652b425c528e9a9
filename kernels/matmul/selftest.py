"""The self-test of matmul: each binary once, on products that are known without multiplying."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from tilewire.kernels.build.operands import lay, like, numbers
from tilewire.kernels.matmul.configs import OUT_DTYPES, Config, Specialization, boxes_of, is_narrow
from tilewire.kernels.matmul.grouped.op import GroupedLaunch, GroupKind
from tilewire.kernels.matmul.members import can_split
from tilewire.kernels.matmul.plan import Epilogue, prepare
from tilewire.kernels.op import SelfTest


@dataclass(frozen=True)
class _Layout:
    """How operands lie: their contiguous dimensions, whether rows start on 16 bytes, and their shape."""

    dtype: str
    a_major: str
    b_major: str
    is_aligned: bool
    rows: int
    is_batched: bool


@dataclass(frozen=True)
class _Case:
    """A product that one binary computes, and what it should give."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue
    expected: torch.Tensor
    config: Config


def self_test(specialization: Specialization, config: Config, device: torch.device) -> SelfTest:
    """Launches one binary and checks it."""
    case = case_of(specialization, config, device)
    prepared = prepare(case.a, case.b, case.out, case.epilogue, specialization.precision, case.config)
    prepared(case.a, case.b, case.out, case.epilogue.bias, None, None)
    return SelfTest(prepared.variants, (case.out.float() == case.expected).all())


def case_of(specialization: Specialization, config: Config, device: torch.device) -> _Case:
    """Returns a product that takes the binary of `specialization` and `config`."""
    # The pointer kernel alone distinguishes aligned inputs from others.
    is_aligned = specialization.store != "scalar" or specialization.kernel != "pointer"
    rows = config.block_m if config.kernel == "vector" else 80 if specialization.store == "tma" else 48
    if is_narrow(config):
        # Two tiles: what the first has room for, and must not store, is the second's.
        rows = 320
    elif config.kernel == "wgmma" and config.is_swapped and boxes_of(config.block_m)[1]:
        # Some of the tail, too.
        rows = 160
    majors = (specialization.a_major, specialization.b_major)
    layout = _Layout(specialization.dtype, *majors, is_aligned, rows, specialization.is_batched)
    a, b, expected = _operands(layout, device)
    dtype = getattr(torch, specialization.out_dtype or OUT_DTYPES[specialization.dtype][0])
    epilogue = Epilogue()
    if not specialization.is_plain:
        bias_dtype = torch.int32 if dtype == torch.int32 else torch.float32
        epilogue = Epilogue(torch.ones(b.shape[-1], dtype=bias_dtype, device=b.device), activation="relu")
        expected = (expected + 1).clamp(min=0)
    out = like(expected, "last", dtype, is_aligned=specialization.store != "scalar")
    out.fill_(-100)
    is_always_shared = specialization.kernel != "wgmma" and specialization.store != "tma" and can_split(config)
    splits = max(specialization.splits, 2 if is_always_shared else 1)
    has_limbs = specialization.precision == "tf32x3"
    return _Case(a, b, out, epilogue, expected, replace(config, split_k=splits, is_copied=has_limbs))


# Binaries that take the same operands follow one another.
@functools.lru_cache(maxsize=2)
def _operands(layout: _Layout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row of `a` picks one row of `b`: (a, b, their product in float32)."""
    m, n, k = layout.rows, 144, 160
    if not layout.is_aligned:
        m, n, k = m - 1, n - 1, k - 3
    batch = (2,) if layout.is_batched else ()
    picked = torch.arange(m, device=device) * 7 % k
    a = torch.zeros((*batch, m, k), device=device)
    a[..., torch.arange(m, device=device), picked] = 1
    b = numbers((*batch, k, n), device)
    dtype = getattr(torch, layout.dtype)
    contiguous = {"k": ("last", "first"), "m": ("first", ""), "n": ("", "last"), "any": ("neither", "neither")}
    laid_a = lay(a, contiguous[layout.a_major][0], dtype, is_aligned=layout.is_aligned)
    laid_b = lay(b, contiguous[layout.b_major][1], dtype, is_aligned=layout.is_aligned)
    return laid_a, laid_b, b[..., picked, :].contiguous()


def grouped_self_test(kind: GroupKind, device: torch.device) -> SelfTest:
    """Launches one binary on two products and checks it."""
    layout = _Layout(kind.dtype, "k", kind.b_major, kind.is_aligned, rows=48, is_batched=False)
    a, b, expected = _operands(layout, device)
    dtype = getattr(torch, kind.out_dtype)
    outs = [torch.empty(expected.shape, dtype=dtype, device=device) for _ in range(2)]
    grouped = GroupedLaunch([a, a], [b, b], outs, [None, None], "none", kind.precision)
    grouped()
    assert grouped.variant is not None, "This is a bug."
    return SelfTest((grouped.variant,), (torch.stack(outs).float() == expected).all())
