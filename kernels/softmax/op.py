"""Softmax: binaries, the public function, and the self-test."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from tilewire.kernels.build.operands import lay, like
from tilewire.kernels.op import SelfTest
from tilewire.kernels.pointwise.copying import contiguous, copy_into
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import FLOATS, name_of, pointer, unit_of
from tilewire.kernels.runtime.launch import Launch, LaunchCache, Variant, are_aligned, device_number
from tilewire.kernels.runtime.pipeline import Detour, Part, Pipeline, Prepared, Step
from tilewire.kernels.runtime.rows import RowsView, check_dtype, check_rows, output, rows_of
from tilewire.kernels.runtime.targets import Target, current
from tilewire.kernels.softmax.across import count_side_by_side
from tilewire.kernels.softmax.configs import (
    MAX_SPLITS,
    SMALL_GROUP,
    Config,
    Problem,
    select,
    select_invariant,
)
from tilewire.kernels.softmax.groups import options_of
from tilewire.kernels.softmax.kernel import (
    softmax_across_kernel,
    softmax_apply_kernel,
    softmax_cooperative_kernel,
    softmax_loop_kernel,
    softmax_partial_kernel,
    softmax_row_kernel,
)

# ── binaries ────────────────────────────────────────────────────────────────────────────────────────


# Kernels that `Config.kernel` stands for, in the order of launch.
KERNELS = {
    "row": (softmax_row_kernel,),
    "loop": (softmax_loop_kernel,),
    "cooperative": (softmax_cooperative_kernel,),
    "across": (softmax_across_kernel,),
    "split": (softmax_partial_kernel, softmax_apply_kernel),
}


def binaries(problem: Problem, config: Config, target: Target) -> Iterator[Variant]:
    """Yields the binaries that compute `problem` by `config`, in the order of launch."""
    return (build(kernel, problem, config, target) for kernel in KERNELS[config.kernel])


def build(kernel: Any, problem: Problem, config: Config, target: Target) -> Variant:
    """The binary of `kernel` (one of `KERNELS[config.kernel]`) that computes `problem` by `config`."""
    types = {
        "x_ptr": pointer(problem.dtype),
        "out_ptr": pointer(problem.out_dtype),
        "partial_ptr": "*fp32",
        "count_ptr": "*i32",
    }
    is_across = config.kernel == "across"
    unit = problem.side_by_side if is_across else unit_of(problem.dtype, is_aligned=problem.is_aligned)
    # What the threads of a row read in one step; there is a thread for each row at least.
    lanes = max(unit, unit * target.warp_size * config.num_warps // config.block_rows)
    constants = {
        "UNIT": unit,
        "LANES": min(lanes, config.block_n),
        "TAIL_LANES": min(lanes, config.tail_n) or 1,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
        "TAIL_N": config.tail_n,
        "MAX_SPLITS": MAX_SPLITS,
        "MAX_GROUP": SMALL_GROUP if config.splits <= SMALL_GROUP else MAX_SPLITS,
    }
    options: dict[str, Any] = {}
    if config.kernel == "row" and target.backend == "cuda" and _fits_64_registers(problem, config):
        options = {"maxnreg": 64}
    if config.kernel == "cooperative":
        constants["OVERLAP"] = False
        options = options_of(config.num_warps, config.programs_per_sm, target)
    aligned = ("x_ptr", "out_ptr", "partial_ptr") if unit > 1 else ()
    return binary(kernel, types, constants, config.num_warps, target, aligned, **options)


def _fits_64_registers(problem: Problem, config: Config) -> bool:
    """Whether a thread of `row` needs no more, though some compilers take more, and programs from a multiprocessor with them.

    So it is with 32 elements a thread, but for the longest rows that are read one by one.
    """
    holds_32 = config.block_n == 32 * 32 * config.num_warps and config.block_rows == 1 and config.tail_n == 0
    return holds_32 and (problem.is_aligned or config.held_n <= 8192)


# ── launches ────────────────────────────────────────────────────────────────────────────────────────


def softmax(
    x: torch.Tensor,
    *,
    axis: int = -1,
    log: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax along `axis`, computed in float32.

    Args:
        x: any shape of rank 1 or more; float16, bfloat16 or float32; any strides.
        axis: the dimension that sums to one.
        log: give the logarithm of the softmax.
        out_dtype: float16, bfloat16 or float32. Default: that of `x`.
        batch_invariant: give each row the same bits whatever the other rows are.
        out: written instead of a new tensor; the shape of `x`, of the output dtype, any strides.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: shape, dtype, axis or `out` cannot be right.
    """
    axis = check_rows(x, axis)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype, FLOATS)
    out = output(out, x.shape, out_dtype, x.device)
    if out.numel() > 0:
        rows, out_rows = x.movedim(axis, -1), out.movedim(axis, -1)
        prepare(rows, out_rows, log=log, config="invariant" if batch_invariant else None)(rows, out_rows)
    return out


def prepare_softmax(
    x: torch.Tensor, out: torch.Tensor, *, axis: int = -1, log: bool = False, batch_invariant: bool = False
) -> Prepared:
    """A launcher for softmaxes like this one: the same shape, strides, dtypes, alignment and options.

    Calling it with `(x, out)` skips every check and choice. It belongs to the calling thread.

    Args:
        x: as in `softmax`.
        out: the shape of `x`, not empty.
        axis: as in `softmax`.
        log: as in `softmax`.
        batch_invariant: as in `softmax`.

    Returns:
        The launcher. Nothing is launched yet, but the kernels are compiled and loaded.

    Raises:
        ValueError: as in `softmax`, or the tensor is empty or its rows need a copy first.
    """
    check_rows(x, axis)
    if out.shape != x.shape or out.numel() == 0 or name_of(out.dtype) not in FLOATS:
        raise ValueError(f"out: expected {tuple(x.shape)}, not empty, got {tuple(out.shape)} of {out.dtype}")
    config: Literal["invariant"] | None = "invariant" if batch_invariant else None
    prepared = prepare(x.movedim(axis, -1), out.movedim(axis, -1), log=log, config=config)
    if not prepared.variants:
        raise ValueError("the dimensions beside the axis do not merge into two: use softmax")
    return prepared


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    x: torch.Tensor, out: torch.Tensor, *, log: bool = False, config: Config | Literal["invariant"] | None = None
) -> Prepared:
    """Prepares the softmax of `x` over its last dimension into `out`, on checked operands.

    Args:
        x: (…, N), at least one element.
        out: the shape of `x`.
        log: logarithm of the softmax.
        config: instead of the one that `select` gives, for tests and tuning; `invariant` for `select_invariant`.
    """
    key = (x.shape, x.stride(), out.stride(), x.dtype, out.dtype, are_aligned((x, out)), log, config, x.device)

    def make() -> Prepared:
        def through_copies(x: torch.Tensor, out: torch.Tensor) -> None:
            x, temporary = contiguous(x), torch.empty(out.shape, dtype=out.dtype, device=out.device)
            prepare(x, temporary, log=log, config=config)(x, temporary)
            copy_into(out, temporary)

        view = rows_of(x, out)
        if view is None:
            return Detour(through_copies)
        problem = _problem(x, out, view, log=log)
        if problem.is_copied:
            return Detour(through_copies)
        target = current(x.get_device())
        chosen = select_invariant(problem, target) if config == "invariant" else config or select(problem, target)
        return _prepared(view, problem, chosen, x.device)

    return _launches.get(key, make)


def _prepared(view: RowsView, problem: Problem, config: Config, device: torch.device) -> Prepared:
    target = current(device_number(device))
    values = _values(view, problem, config)
    rows, splits = problem.rows, config.splits
    grid: tuple[int, ...] = (-(-rows // config.block_rows),)
    num_partials, num_counters = 0, 0
    if config.kernel == "split":
        grid, num_partials = (rows, splits), 2 * rows * splits
    if config.kernel == "cooperative":
        programs = target.num_sms * config.programs_per_sm
        num_counters = min(rows, programs // splits)
        grid, num_partials = (num_counters * splits,), 4 * programs
    launches = [Launch(variant, grid, values, device) for variant in binaries(problem, config, target)]
    if not num_partials:
        return launches[0]
    steps = [Step(launch, operands) for launch, operands in zip(launches, _OPERANDS[config.kernel], strict=True)]
    parts = {"partial": Part(torch.float32, (num_partials,))}
    return Pipeline(("x", "out"), steps, device, parts, num_counters)


# Operands of the kernels that share a row, in the order of launch.
_OPERANDS = {
    "cooperative": (("x", "out", "partial", "count"),),
    "split": (("x", "partial"), ("x", "out", "partial")),
}


def _problem(x: torch.Tensor, out: torch.Tensor, view: RowsView, *, log: bool) -> Problem:
    unit = 16 // x.element_size()
    is_contiguous = all(strides[2] == 1 for strides in view.strides)
    spans = (view.n, *(stride for strides in view.strides for stride in strides[:2]))
    is_aligned = are_aligned((x, out))
    dtypes = name_of(x.dtype), name_of(out.dtype)
    return Problem(
        view.rows[0] * view.rows[1],
        view.n,
        *dtypes,
        is_contiguous,
        is_contiguous and is_aligned and all(span % unit == 0 for span in spans),
        log,
        count_side_by_side(view.n, view.rows[1], view.strides, *dtypes) if is_aligned else 1,
    )


def _values(view: RowsView, problem: Problem, config: Config) -> dict[str, int]:
    values = {"log": int(problem.log)}
    if config.kernel == "across":
        values |= view.sizes_across(problem.side_by_side)
    else:
        values |= view.sizes(unit_of(problem.dtype, is_aligned=problem.is_aligned))
    values |= {"group_size": config.splits, "blocks_per_split": -(-problem.n // (config.block_n * config.splits))}
    return values


# ── self-test ───────────────────────────────────────────────────────────────────────────────────────


def self_test(problem: Problem, config: Config, device: torch.device) -> SelfTest:
    """Launches the binaries of one configuration and checks them."""
    splits = max(2, config.splits) if config.kernel == "split" else config.splits
    config = replace(config, splits=splits)
    n = 40 if config.kernel == "across" else config.held_n * splits
    # A multiple of those that are read at once, and of no more.
    rows = 3 * problem.side_by_side
    x = torch.full((rows, n if problem.is_aligned else n - 1), -torch.inf, device=device)
    # A power of two, so that the quotient is exact.
    equal = 1 << (min(8, x.shape[1]).bit_length() - 1)
    x[:, -equal:] = 0
    contiguous = "last" if problem.is_contiguous else "first"
    is_aligned = problem.is_aligned or problem.side_by_side > 1
    laid = lay(x, contiguous, getattr(torch, problem.dtype), is_aligned=is_aligned)
    out = like(x, contiguous, getattr(torch, problem.out_dtype), is_aligned=is_aligned)
    plain, logarithm = (prepare(laid, out, log=log, config=config) for log in (False, True))
    out.fill_(-1)
    plain(laid, out)
    is_plain = out.float() == torch.exp(x) / equal
    out.fill_(-1)
    logarithm(laid, out)
    found = out.float()
    # The driver's logarithm is off in its last bits.
    is_log = ((found - (x - math.log(equal))).abs() < 0.02) | (torch.isinf(x) & (found == x))
    return SelfTest(plain.variants, is_plain.all() & is_log.all())
