"""Reductions: binaries, the public function, and the self-test with its oracle."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Literal

import torch

from tilewire.kernels.build.operands import numbers
from tilewire.kernels.op import SelfTest
from tilewire.kernels.pointwise.copying import contiguous, copy_into
from tilewire.kernels.reduce.configs import KINDS, OUT_KINDS, SHORT, Config, Kind, Problem, choose, choose_invariant
from tilewire.kernels.reduce.kernel import reduce_column_kernel, reduce_row_kernel
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import FLOATS, name_of, pointer
from tilewire.kernels.runtime.launch import Launch, LaunchCache, Variant, are_aligned
from tilewire.kernels.runtime.pipeline import Detour, Part, Pipeline, Prepared, Step
from tilewire.kernels.runtime.rows import RowsView, check_counts, check_dtype, check_rows, rows_of
from tilewire.kernels.runtime.strides import collapse
from tilewire.kernels.runtime.targets import Target, current

# ── binaries ────────────────────────────────────────────────────────────────────────────────────────


def build(problem: Problem, config: Config, target: Target) -> Variant:
    """The binary of a configuration."""
    types = {"x_ptr": pointer(problem.dtype), "out_ptr": "*i8", "partial_ptr": "*i32", "count_ptr": "*i32"}
    constants = {
        "PIECE" if problem.is_row else "UNIT": problem.unit,
        "CUT": problem.is_cut,
        "STATE": problem.state,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": config.block_n,
        "LANE": _lane(problem, config, target),
        "UNIT_INNER": problem.is_unit_inner,
    }
    kernel = reduce_row_kernel if problem.is_row else reduce_column_kernel
    return binary(kernel, types, constants, config.num_warps, target)


def _lane(problem: Problem, config: Config, target: Target) -> int:
    """Elements of a row that one thread holds at a time, as the compiler spreads a block over threads."""
    if problem.is_row:
        # Element by element, neighbours lie in other threads.
        return min(problem.unit, config.block_n)
    threads = target.warp_size * config.num_warps
    return max(1, config.block_n // max(1, threads * problem.unit // config.block_rows))


# ── launches ────────────────────────────────────────────────────────────────────────────────────────


def reduce(
    x: torch.Tensor,
    kind: str,
    *,
    axis: int | None = -1,
    keepdims: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Reduces `x` along one axis or over all elements, in float32.

    Args:
        x: Any shape of rank 1 or more; float16, bfloat16 or float32; any strides.
        kind: `sum`, `mean`, `max`, `min`, `argmax`, `argmin`, `logsumexp` or `norm` (the 2-norm). NaN is the maximum and
            the minimum of what holds one; the first of equal elements gives the index.
        axis: Dimension, or None for all; indices then count in row-major order.
        keepdims: Whether reduced dimensions stay, with length 1.
        out_dtype: float16, bfloat16 or float32; int64 for indices. Default: that of `x`, int64 for indices.
        batch_invariant: Give each result the same bits whatever rows are beside it.

    Returns:
        The reduced tensor.

    Raises:
        ValueError: Shape, dtype, kind or axis cannot be right, or it is the maximum of nothing.
    """
    axis = _check(x, kind, axis, out_dtype)
    default = torch.int64 if KINDS[kind].is_index else x.dtype
    if axis is None:
        shape: tuple[int, ...] = (1,) * x.dim() if keepdims else ()
    else:
        shape = (*x.shape[:axis], *((1,) if keepdims else ()), *x.shape[axis + 1 :])
    out = torch.empty(shape, dtype=out_dtype or default, device=x.device)
    if out.numel() > 0:
        prepare_reduce(x, out, kind=kind, axis=axis, batch_invariant=batch_invariant)(x, out)
    return out


def prepare_reduce(
    x: torch.Tensor, out: torch.Tensor, *, kind: str, axis: int | None = -1, batch_invariant: bool = False
) -> Prepared:
    """Prepares reductions of tensors of these shapes, strides, dtypes and alignment.

    Args:
        x: As in `reduce`.
        out: As many elements as there are results, not empty, contiguous; its dtype as `out_dtype` in `reduce`.
        kind: As in `reduce`.
        axis: As in `reduce`.
        batch_invariant: As in `reduce`.

    Returns:
        A launcher, called with `(x, out)`. It belongs to the calling thread.

    Raises:
        ValueError: As in `reduce`, or `out` does not fit.
    """
    axis = _check(x, kind, axis, out.dtype)
    results = 1 if axis is None else math.prod((*x.shape[:axis], *x.shape[axis + 1 :]))
    if out.numel() != results or results == 0 or not out.is_contiguous():
        raise ValueError(f"out: expected {results} elements, contiguous, got {tuple(out.shape)}")
    return prepare(x, out, kind=kind, axis=axis, config="invariant" if batch_invariant else None)


def _check(x: torch.Tensor, kind: str, axis: int | None, out_dtype: torch.dtype | None) -> int | None:
    """The axis, counted from the front."""
    from_front = check_rows(x, -1 if axis is None else axis)
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind}")
    if out_dtype is not None:
        check_dtype("out_dtype", out_dtype, ("int64",) if KINDS[kind].is_index else FLOATS)
    n = x.numel() if axis is None else x.shape[axis]
    if n == 0 and not KINDS[kind].has_empty:
        raise ValueError(f"x: {kind} of no element is not defined, got {tuple(x.shape)}")
    results = 1 if axis is None else math.prod((*x.shape[:from_front], *x.shape[from_front + 1 :]))
    if results:
        check_counts("x", elements=n, rows=results)
    return axis if axis is None else from_front


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    kind: str,
    axis: int | None,
    config: Config | Literal["invariant"] | None = None,
) -> Prepared:
    """Prepares launches on checked operands.

    `config` replaces the choice, for tests and tuning; `invariant` is for `choose_invariant`.
    """
    key = (x.shape, x.stride(), x.dtype, out.dtype, are_aligned((x,)), kind, axis, config, x.device)

    def make() -> Prepared:
        n = x.numel() if axis is None else x.shape[axis]
        if n == 1 and not isinstance(config, Config):
            return Detour(functools.partial(_of_one, KINDS[kind]))
        view = _view(x, axis, is_index=KINDS[kind].is_index)
        # All elements are one row, which has none beside it.
        wanted = None if config == "invariant" and axis is None else config
        if view is not None and not (wanted == "invariant" and _begin_apart(x, view)):
            return _pipeline(x, out, view, kind, wanted, is_copied=False)
        # Rows begin where a piece does.
        unit = 16 // x.element_size()
        step = -(-n // unit) * unit
        pipeline = _pipeline(x, out, RowsView((1, out.numel()), n, ((0, step, 1),)), kind, wanted, is_copied=True)
        return Detour(functools.partial(_through_rows, pipeline, axis, step), pipeline)

    return _launches.get(key, make)


def _begin_apart(x: torch.Tensor, view: RowsView) -> bool:
    """Whether rows of neighbours begin at different places of their pieces, which decide what is summed with what."""
    unit = 16 // x.element_size()
    ((stride_outer, stride_inner, stride_n),) = view.strides
    return stride_n == 1 and not (are_aligned((x,)) and stride_outer % unit == stride_inner % unit == 0)


def _through_rows(pipeline: Pipeline, axis: int | None, step: int, x: torch.Tensor, out: torch.Tensor) -> None:
    """Reduces rows that are copied to begin `step` elements apart, or all elements as one row."""
    if axis is None:
        pipeline(contiguous(x), out)
        return
    rows = x.movedim(axis, -1)
    laid = torch.empty((*rows.shape[:-1], step), dtype=x.dtype, device=x.device)[..., : rows.shape[-1]]
    copy_into(laid, rows)
    pipeline(laid, out)


def _of_one(kind: Kind, x: torch.Tensor, out: torch.Tensor) -> None:
    """Every reduction of one element: the element, its magnitude, or the index 0."""
    if kind.is_index:
        out.zero_()
        return
    if kind.power == 2:
        torch.abs(x.reshape(out.shape), out=out)
    else:
        out.copy_(x.reshape(out.shape))


def _view(x: torch.Tensor, axis: int | None, *, is_index: bool) -> RowsView | None:
    """How the kernels can walk `x`; None where it must be copied first."""
    if axis is not None:
        return rows_of(x.movedim(axis, -1))
    # All elements are read as they lie, unless their order counts.
    order = range(x.dim()) if is_index else sorted(range(x.dim()), key=x.stride, reverse=True)
    extents, (strides,) = collapse([x.shape[dim] for dim in order], [x.stride(dim) for dim in order])
    if len(extents) > 1:
        return None
    return RowsView((1, 1), x.numel(), ((0, 0, strides[0] if strides else 1),))


def _pipeline(
    x: torch.Tensor,
    out: torch.Tensor,
    view: RowsView,
    kind: str,
    config: Config | Literal["invariant"] | None,
    *,
    is_copied: bool,
) -> Pipeline:
    target = current(x.get_device())
    problem = _problem(x, view, KINDS[kind], is_copied=is_copied)
    if not isinstance(config, Config):
        config = (choose_invariant if config == "invariant" else choose)(problem, target)
    # The sizes of columns come in units.
    unit = 1 if problem.is_row else problem.unit
    ((stride_outer, stride_inner, stride_n),) = view.strides
    sizes = {
        "rows": problem.rows // unit,
        "n": view.n,
        "blocks": -(-problem.n // config.block_n),
        "rows_inner": view.rows[1] // unit,
        "stride_outer": stride_outer // unit,
        "stride_inner": stride_inner,
        "stride_n": stride_n // unit,
        "parts": config.parts,
        "kind": KINDS[kind].number,
        "flip": KINDS[kind].flip,
        "power": KINDS[kind].power,
        "out_kind": OUT_KINDS[name_of(out.dtype)],
    }
    blocks = -(-problem.rows // config.block_rows)
    launch = Launch(build(problem, config, target), (blocks * config.parts,), sizes, x.device)
    is_shared = config.parts > 1
    states = {"states": Part(torch.int32, (2, problem.rows, config.parts) if is_shared else (1,))}
    steps = [Step(launch, ("x", "out", "states", "count"))]
    return Pipeline(("x", "out"), steps, x.device, states, num_counters=blocks if is_shared else 0)


def _problem(x: torch.Tensor, view: RowsView, kind: Kind, *, is_copied: bool) -> Problem:
    unit = 16 // x.element_size()
    ((stride_outer, stride_inner, stride_n),) = view.strides
    # Rows of one element lie side by side.
    is_row = view.n != 1 and (stride_n == 1 or view.n == 0)
    is_unit_inner = stride_inner == 1 or view.rows[1] == 1
    spans = (view.n, stride_outer, stride_inner) if is_row else (view.rows[1], stride_outer, stride_n * (view.n > 1))
    is_aligned = (is_copied or are_aligned((x,))) and all(span % unit == 0 for span in spans)
    is_aligned = is_aligned and (is_row or (is_unit_inner and view.n > 0))
    is_cut = is_row and not is_aligned and view.n > SHORT
    n = view.n + (unit - 1 if is_cut else 0)
    sizes = (view.rows[0] * view.rows[1], view.rows[1], n)
    lying = (is_row, is_aligned or is_cut, is_row or is_unit_inner, is_cut)
    return Problem(*sizes, name_of(x.dtype), kind.state, *lying)


# ── self-test ───────────────────────────────────────────────────────────────────────────────────────


# A kind of each state, by its number.
_KINDS = ("sum", "argmax", "logsumexp", "max")


def self_test(problem: Problem, config: Config, device: torch.device) -> SelfTest:
    """Launches the binaries of one configuration and checks them."""
    n = 3 * config.block_n - (0 if problem.is_aligned else 1)
    rows = -(-config.block_rows // 16) * 16 + (16 if problem.is_aligned else 3)
    if problem.is_row:
        n = n - 1 if problem.is_cut else n if problem.is_aligned else min(n, SHORT - 1)
        # More than a block. The last is not full, where it has several rows.
        rows = config.block_rows + 3
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
    shared = replace(config, parts=2)
    prepared = prepare(x, out, kind=kind, axis=axis, config=shared)
    prepared(x, out)
    expected = reduce_reference(x, kind, axis=axis)
    is_right = (out.double() - expected).abs() <= (1e-5 * expected.abs() if kind == "logsumexp" else 0.0)
    return SelfTest(prepared.variants, is_right.all())


def reduce_reference(x: torch.Tensor, kind: str, *, axis: int | None = -1, keepdims: bool = False) -> torch.Tensor:
    """The reduction of `x` along `axis`, or over all elements with None, in float64; indices in int64."""
    wide = x.double()
    if axis is None:
        out = reduce_reference(wide.reshape(-1), kind)
        return out.reshape((1,) * x.dim()) if keepdims else out
    if kind in ("argmax", "argmin"):
        # PyTorch does not promise the first of equal elements; a stable sort with NaN in front does.
        order = torch.sort(wide + 0.0, dim=axis, descending=kind == "argmax", stable=True).indices.select(axis, 0)
        nan = wide.isnan()
        out = torch.where(nan.any(axis), nan.int().argmax(axis), order)
        return out.unsqueeze(axis) if keepdims else out
    if kind == "logsumexp":
        return torch.logsumexp(wide, axis, keepdim=keepdims)
    if kind == "norm":
        norm: torch.Tensor = torch.linalg.vector_norm(wide, 2, axis, keepdim=keepdims)
        return norm
    if kind in ("sum", "mean"):
        return wide.sum(axis, keepdim=keepdims) if kind == "sum" else wide.mean(axis, keepdim=keepdims)
    return wide.amax(axis, keepdim=keepdims) if kind == "max" else wide.amin(axis, keepdim=keepdims)
