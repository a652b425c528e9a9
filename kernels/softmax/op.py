"""The public softmax: checks its arguments, brings any strides and axis into the kernels' form, and launches."""

from __future__ import annotations

from typing import Literal

import torch

from tilewire.kernels.runtime.kinds import FLOATS, name_of, unit_of
from tilewire.kernels.runtime.launch import Launch, LaunchCache, are_aligned, device_number
from tilewire.kernels.runtime.pipeline import Detour, Part, Pipeline, Prepared, Step
from tilewire.kernels.runtime.rows import RowsView, check_rows, rows_of
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.softmax.configs import Config, Problem
from tilewire.kernels.softmax.select import select, select_invariant
from tilewire.kernels.softmax.variants import binaries


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
    if name_of(out_dtype) not in FLOATS:
        raise ValueError(f"out_dtype: expected one of {', '.join(FLOATS)}, got {out_dtype}")
    if out is None:
        out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    elif out.shape != x.shape or out.dtype != out_dtype or out.device != x.device:
        raise ValueError(f"out: expected {tuple(x.shape)} of {out_dtype}, got {tuple(out.shape)} of {out.dtype}")
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
            x, temporary = x.contiguous(), torch.empty(out.shape, dtype=out.dtype, device=out.device)
            prepare(x, temporary, log=log, config=config)(x, temporary)
            out.copy_(temporary)

        view = rows_of(x, out)
        if view is None:
            return Detour(through_copies)
        problem = _problem(x, out, view, log=log)
        target = current(x.get_device())
        chosen = select_invariant(problem, target) if config == "invariant" else config or select(problem, target)
        return _prepared(view, problem, chosen, x.device)

    return _launches.get(key, make)


def _prepared(view: RowsView, problem: Problem, config: Config, device: torch.device) -> Prepared:
    target = current(device_number(device))
    values = _values(view, problem, config)
    rows, splits = problem.rows, config.splits
    grid: tuple[int, ...] = (-(-rows // config.block_rows),)
    num_partials = 0
    if config.kernel == "split":
        grid, num_partials = (rows, splits), 2 * rows * splits
    if config.kernel == "cooperative":
        programs = target.num_sms * config.programs_per_sm
        grid, num_partials = (min(rows, programs // splits) * splits,), 4 * programs
    launches = [Launch(variant, grid, values, device) for variant in binaries(problem, config, target)]
    if not num_partials:
        return launches[0]
    steps = [Step(launch, operands) for launch, operands in zip(launches, _OPERANDS[config.kernel], strict=True)]
    parts = {"partial": Part(torch.float32, (num_partials,))}
    return Pipeline(("x", "out"), steps, device, parts, num_counters=1)


# Operands of the kernels that share a row, in the order of launch.
_OPERANDS = {
    "cooperative": (("x", "out", "partial", "count"),),
    "split": (("x", "partial"), ("x", "out", "partial")),
}


def _problem(x: torch.Tensor, out: torch.Tensor, view: RowsView, *, log: bool) -> Problem:
    unit = 16 // x.element_size()
    is_contiguous = all(strides[2] == 1 for strides in view.strides)
    spans = (view.n, *(stride for strides in view.strides for stride in strides[:2]))
    is_aligned = are_aligned((x, out)) and all(span % unit == 0 for span in spans)
    return Problem(
        view.rows[0] * view.rows[1],
        view.n,
        name_of(x.dtype),
        name_of(out.dtype),
        is_contiguous,
        is_contiguous and is_aligned,
        log,
    )


def _values(view: RowsView, problem: Problem, config: Config) -> dict[str, int]:
    unit = unit_of(problem.dtype, is_aligned=problem.is_aligned)
    values = {"log": int(problem.log)}
    for letter, strides in zip("xo", view.strides, strict=True):
        values |= {f"stride_{letter}{dim}": stride // unit for dim, stride in zip("oin", strides, strict=True)}
    values |= {"rows": problem.rows, "rows_inner": view.rows[1], "n": problem.n // unit}
    values |= {"group_size": config.splits, "blocks_per_split": -(-problem.n // (config.block_n * config.splits))}
    return values
