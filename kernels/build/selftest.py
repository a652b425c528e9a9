"""Running every binary of a target once, on small tensors whose result is known without multiplying. Needs the device.

Each trial is one launch of one binary and one comparison on the device; nothing is awaited until the end, so that a
thousand of them take about a second. What is tried is exact in every dtype: whole numbers of a few bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tilewire.kernels.add.configs import Config as AddConfig
from tilewire.kernels.add.configs import Family as AddFamily
from tilewire.kernels.add.configs import members as add_members
from tilewire.kernels.add.op import prepare as prepare_add
from tilewire.kernels.copy.op import WORDS, Stretch, copy_stretches
from tilewire.kernels.copy.op import variant as staging_variant
from tilewire.kernels.matmul.configs import OUT_DTYPES, PRECISIONS, Config, Family
from tilewire.kernels.matmul.grouped.op import GroupedLaunch
from tilewire.kernels.matmul.members import can_split, is_supported
from tilewire.kernels.matmul.members import members as matmul_members
from tilewire.kernels.matmul.plan import Epilogue
from tilewire.kernels.matmul.plan import prepare as prepare_matmul
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.softmax.configs import Config as SoftmaxConfig
from tilewire.kernels.softmax.configs import Problem as SoftmaxProblem
from tilewire.kernels.softmax.configs import members as softmax_members
from tilewire.kernels.softmax.op import prepare as prepare_softmax


@dataclass(frozen=True)
class Trial:
    """One binary, and whether what it gave is what it should.

    Attributes:
        variants: what was launched.
        is_right: a boolean on the device.
    """

    variants: tuple[Variant, ...]
    is_right: torch.Tensor


Start = Callable[[], Trial]
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def trials(target: Target, device: torch.device, *, every: int = 1) -> Iterator[Trial]:
    """Launches every variant of `target`, or every so-manieth, on the current stream of `device`."""
    listed = (
        _matmul_trials(target, device),
        _grouped_trials(target, device),
        _softmax_trials(target, device),
        _add_trials(target, device),
        _staging_trials(device),
    )
    for start in itertools.islice(itertools.chain(*listed), 0, None, every):
        yield start()


def wrong(tried: Sequence[Trial]) -> list[Variant]:
    """Waits for the device; the variants that gave a wrong result."""
    if not tried:
        return []
    flags = torch.stack([trial.is_right for trial in tried]).tolist()
    return [variant for trial, is_right in zip(tried, flags, strict=True) if not is_right for variant in trial.variants]


@dataclass(frozen=True)
class _Layout:
    """How operands lie: their contiguous dimensions, whether rows start on 16 bytes, and their shape."""

    dtype: str
    a_major: str
    b_major: str
    is_aligned: bool
    has_many_rows: bool
    is_batched: bool


def _matmul_trials(target: Target, device: torch.device) -> Iterator[Start]:
    operands = functools.cache(functools.partial(_operands, device=device))
    for family, config in dict.fromkeys(matmul_members(target)):
        # Descriptors read rows of any length; only the pointer kernel tells aligned inputs from others.
        is_aligned = family.kernel == "tma" or family.store == "pieces"
        layout = _Layout(
            family.dtype, family.a_major, family.b_major, is_aligned, family.store == "boxes", family.is_batched
        )
        yield functools.partial(_matmul_trial, family, config, functools.partial(operands, layout))


def _matmul_trial(family: Family, config: Config, operands: Callable[[], Operands]) -> Trial:
    a, b, expected = operands()
    dtype = getattr(torch, family.out_dtype or OUT_DTYPES[family.dtype][0])
    epilogue = Epilogue()
    if not family.is_plain:
        bias_dtype = torch.int32 if dtype == torch.int32 else torch.float32
        epilogue = Epilogue(torch.ones(b.shape[-1], dtype=bias_dtype, device=b.device), activation="relu")
        expected = (expected + 1).clamp(min=0)
    out = _like(expected, "last", dtype, is_aligned=family.store != "elements")
    out.fill_(-100)
    splits = 2 if can_split(config) and family.store != "boxes" else 1
    prepared = prepare_matmul(a, b, out, epilogue, family.precision, replace(config, split_k=splits))
    assert prepared is not None, "This is a bug."
    prepared(a, b, out, epilogue.bias, None, None)
    return Trial((prepared.variant,), (out.float() == expected).all())


def _operands(layout: _Layout, device: torch.device) -> Operands:
    """Each row of `a` picks one row of `b`: (a, b, their product in float32)."""
    m, n, k = (80 if layout.has_many_rows else 48, 144, 160)
    if not layout.is_aligned:
        m, n, k = m - 1, n - 1, k - 3
    batch = (2,) if layout.is_batched else ()
    picked = torch.arange(m, device=device) * 7 % k
    a = torch.zeros((*batch, m, k), device=device)
    a[..., torch.arange(m, device=device), picked] = 1
    b = _numbers((*batch, k, n), device)
    dtype = getattr(torch, layout.dtype)
    contiguous = {"k": ("last", "first"), "m": ("first", ""), "n": ("", "last"), "any": ("neither", "neither")}
    laid_a = _lay(a, contiguous[layout.a_major][0], dtype, is_aligned=layout.is_aligned)
    laid_b = _lay(b, contiguous[layout.b_major][1], dtype, is_aligned=layout.is_aligned)
    return laid_a, laid_b, b[..., picked, :].contiguous()


def _numbers(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Whole numbers from -6 to 6, no two neighbours alike."""
    steps = (3, 5, 2, 7)
    total = torch.zeros(shape, device=device)
    for dim, step in zip(range(len(shape)), steps, strict=False):
        index = torch.arange(shape[-1 - dim], device=device) * step
        total = total + index.reshape(-1, *(1,) * dim)
    return total % 13 - 6


def _lay(values: torch.Tensor, contiguous: str, dtype: torch.dtype, *, is_aligned: bool) -> torch.Tensor:
    return _like(values, contiguous, dtype, is_aligned=is_aligned).copy_(values)


def _like(values: torch.Tensor, contiguous: str, dtype: torch.dtype, *, is_aligned: bool) -> torch.Tensor:
    """An empty tensor of the shape of `values`: its `first`, `last` or `neither` of two dimensions contiguous."""
    *outer, rows, columns = values.shape
    pad = 16 if is_aligned else 1 + rows % 2
    if contiguous == "neither":
        return torch.empty((*outer, rows, 2 * columns), dtype=dtype, device=values.device)[..., ::2]
    if contiguous == "last":
        return torch.empty((*outer, rows, columns + pad), dtype=dtype, device=values.device)[..., :columns]
    return torch.empty((*outer, columns, rows + pad), dtype=dtype, device=values.device)[..., :rows].mT


def _grouped_trials(target: Target, device: torch.device) -> Iterator[Start]:
    kinds = [(dtype, precision) for dtype in OUT_DTYPES for precision in PRECISIONS if is_supported(dtype, target)]
    for (dtype, precision), b_major, is_aligned in itertools.product(kinds, "nk", (True, False)):
        if precision == "ieee" or dtype == "float32":
            layout = _Layout(dtype, "k", b_major, is_aligned, has_many_rows=False, is_batched=False)
            yield functools.partial(_grouped_trial, layout, precision, device)


def _grouped_trial(layout: _Layout, precision: str, device: torch.device) -> Trial:
    a, b, expected = _operands(layout, device)
    dtype = getattr(torch, OUT_DTYPES[layout.dtype][0])
    outs = [torch.empty(expected.shape, dtype=dtype, device=device) for _ in range(2)]
    grouped = GroupedLaunch([a, a], [b, b], outs, [None, None], "none", precision)
    grouped()
    assert grouped.variant is not None, "This is a bug."
    return Trial((grouped.variant,), (torch.stack(outs).float() == expected).all())


def _softmax_trials(target: Target, device: torch.device) -> Iterator[Start]:
    for problem, config in dict.fromkeys(softmax_members(target)):
        yield functools.partial(_softmax_trial, problem, config, device)


def _softmax_trial(problem: SoftmaxProblem, config: SoftmaxConfig, device: torch.device) -> Trial:
    splits = max(2, config.splits) if config.kernel == "split" else config.splits
    config = replace(config, splits=splits)
    n = 40 if config.kernel == "column" else config.block_n * splits
    x = torch.full((3, n if problem.is_aligned else n - 1), -torch.inf, device=device)
    x[:, -8:] = 0
    contiguous = "last" if problem.is_contiguous else "first"
    laid = _lay(x, contiguous, getattr(torch, problem.dtype), is_aligned=problem.is_aligned)
    out = _like(x, contiguous, getattr(torch, problem.out_dtype), is_aligned=problem.is_aligned)
    out.fill_(-1)
    prepared = prepare_softmax(laid, out, log=problem.log, config=config)
    assert prepared is not None, "This is a bug."
    prepared(laid, out)
    if problem.log:
        # The driver's logarithm is off in its last bits.
        close = (out.float() - (x - math.log(8))).abs() < 0.02
        return Trial(prepared.variants, (close | (torch.isinf(x) & (out.float() == x))).all())
    return Trial(prepared.variants, (out.float() == torch.exp(x) / 8).all())


def _add_trials(target: Target, device: torch.device) -> Iterator[Start]:
    for family, config in dict.fromkeys(add_members(target)):
        yield functools.partial(_add_trial, family, config, device)


def _add_trial(family: AddFamily, config: AddConfig, device: torch.device) -> Trial:
    dtype = getattr(torch, family.dtype)
    other = torch.float16 if family.dtype == "float32" else torch.float32
    n = 2 * config.block_n if family.is_aligned else 2 * config.block_n - 1
    shape = {0: (n,), 1: (5, n), 3: (2, 3, n)}[family.outer_rank]
    values = _numbers(shape, device)
    a, b = (_strided(values, inner, dtype, is_aligned=family.is_aligned) for inner in family.inner[:2])
    out = _strided(values, family.inner[2], dtype if family.is_typed else other, is_aligned=family.is_aligned)
    launch = prepare_add(a, b, out, alpha=2, config=config)
    assert launch is not None, "This is a bug."
    launch(a, b, out)
    return Trial((launch.variant,), (out.float() == a.float() + 2 * b.float()).all())


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


def _staging_trials(device: torch.device) -> Iterator[Start]:
    for word, has_rows in itertools.product(WORDS, (False, True)):
        yield functools.partial(_staging_trial, word, device, has_rows=has_rows)


def _staging_trial(word: int, device: torch.device, *, has_rows: bool) -> Trial:
    source = torch.arange(256, dtype=torch.uint8, device=device)
    copied = torch.zeros(512, dtype=torch.uint8, device=device)
    row = 8 * word
    rows = (row, row, 2 * row) if has_rows else ()
    table = copy_stretches([Stretch(source.data_ptr() + word, copied.data_ptr() + word, 2 * row, *rows)], device)
    assert table is not None, "This is a bug."
    second = word + (2 * row if has_rows else row)
    first_row = copied[word : word + row] == source[word : word + row]
    second_row = copied[second : second + row] == source[word + row : word + 2 * row]
    return Trial((staging_variant(word, has_rows),), (first_row & second_row).all())
