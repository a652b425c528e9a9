"""The self-test of matmul: each binary once, on products that are known without multiplying."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tilewire.kernels.build.operands import lay, like, numbers
from tilewire.kernels.matmul.configs import OUT_DTYPES, PRECISIONS, Config, Specialization
from tilewire.kernels.matmul.grouped.op import GroupedLaunch
from tilewire.kernels.matmul.members import can_split, is_supported, members
from tilewire.kernels.matmul.plan import Epilogue, prepare
from tilewire.kernels.op import SelfTest
from tilewire.kernels.runtime.targets import Target

_Start = Callable[[], SelfTest]
_Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def self_tests(target: Target, device: torch.device) -> Iterator[_Start]:
    """Yields one call for each binary of a target, which launches and checks it."""
    return itertools.chain(_matmul_self_tests(target, device), _grouped_self_tests(target, device))


@dataclass(frozen=True)
class _Layout:
    """How operands lie: their contiguous dimensions, whether rows start on 16 bytes, and their shape."""

    dtype: str
    a_major: str
    b_major: str
    is_aligned: bool
    rows: int
    is_batched: bool


def _matmul_self_tests(target: Target, device: torch.device) -> Iterator[_Start]:
    operands = functools.cache(functools.partial(_operands, device=device))
    for specialization, config in dict.fromkeys(members(target)):
        # Descriptors read rows of any length; only the pointer kernel distinguishes aligned inputs from others.
        is_aligned = specialization.store != "scalar" or specialization.kernel == "tma"
        rows = config.block_m if config.kernel == "vector" else 80 if specialization.store == "tma" else 48
        layout = _Layout(
            specialization.dtype,
            specialization.a_major,
            specialization.b_major,
            is_aligned,
            rows,
            specialization.is_batched,
        )
        yield functools.partial(_matmul_self_test, specialization, config, functools.partial(operands, layout))


def _matmul_self_test(specialization: Specialization, config: Config, operands: Callable[[], _Operands]) -> SelfTest:
    a, b, expected = operands()
    dtype = getattr(torch, specialization.out_dtype or OUT_DTYPES[specialization.dtype][0])
    epilogue = Epilogue()
    if not specialization.is_plain:
        bias_dtype = torch.int32 if dtype == torch.int32 else torch.float32
        epilogue = Epilogue(torch.ones(b.shape[-1], dtype=bias_dtype, device=b.device), activation="relu")
        expected = (expected + 1).clamp(min=0)
    out = like(expected, "last", dtype, is_aligned=specialization.store != "scalar")
    out.fill_(-100)
    splits = 2 if can_split(config) and specialization.store != "tma" else 1
    prepared = prepare(a, b, out, epilogue, specialization.precision, replace(config, split_k=splits))
    assert prepared is not None, "This is a bug."
    prepared(a, b, out, epilogue.bias, None, None)
    return SelfTest((prepared.variant,), (out.float() == expected).all())


def _operands(layout: _Layout, device: torch.device) -> _Operands:
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


def _grouped_self_tests(target: Target, device: torch.device) -> Iterator[_Start]:
    kinds = [(dtype, precision) for dtype in OUT_DTYPES for precision in PRECISIONS if is_supported(dtype, target)]
    for (dtype, precision), b_major, is_aligned in itertools.product(kinds, "nk", (True, False)):
        if precision == "ieee" or dtype == "float32":
            layout = _Layout(dtype, "k", b_major, is_aligned, rows=48, is_batched=False)
            yield functools.partial(_grouped_self_test, layout, precision, device)


def _grouped_self_test(layout: _Layout, precision: str, device: torch.device) -> SelfTest:
    a, b, expected = _operands(layout, device)
    dtype = getattr(torch, OUT_DTYPES[layout.dtype][0])
    outs = [torch.empty(expected.shape, dtype=dtype, device=device) for _ in range(2)]
    grouped = GroupedLaunch([a, a], [b, b], outs, [None, None], "none", precision)
    grouped()
    assert grouped.variant is not None, "This is a bug."
    return SelfTest((grouped.variant,), (torch.stack(outs).float() == expected).all())
