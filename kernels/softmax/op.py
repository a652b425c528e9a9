"""The public softmax: checks its arguments, brings any strides and axis into the kernels' form, and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.launching import Launch, Variant, are_aligned
from kernels.softmax.configs import DTYPES, Config, Problem, choose
from kernels.softmax.variants import KERNELS, build
from kernels.strides import collapse
from kernels.targets import Target, current

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def softmax(
    x: torch.Tensor,
    *,
    axis: int = -1,
    log: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax along `axis`, computed in float32.

    Args:
        x: any shape of rank 1 or more; float16, bfloat16 or float32; any strides.
        axis: the dimension that sums to one.
        log: give the logarithm of the softmax.
        out_dtype: float16, bfloat16 or float32. Default: that of `x`.
        out: written instead of a new tensor; the shape of `x`, of the output dtype, any strides.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: shape, dtype, axis or `out` cannot be right.
    """
    axis = _check(x, axis)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if out_dtype not in _DTYPES:
        raise ValueError(f"out_dtype: expected one of {', '.join(DTYPES)}, got {out_dtype}")
    if out is None:
        out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    elif out.shape != x.shape or out.dtype != out_dtype or out.device != x.device:
        raise ValueError(f"out: expected {tuple(x.shape)} of {out_dtype}, got {tuple(out.shape)} of {out.dtype}")
    if out.numel() > 0:
        launch(x.movedim(axis, -1), out.movedim(axis, -1), log=log)
    return out


def _check(x: torch.Tensor, axis: int) -> int:
    if x.dim() == 0:
        raise ValueError("x: needs one dimension or more")
    if x.dtype not in _DTYPES:
        raise ValueError(f"x: dtype {x.dtype} is not one of {', '.join(DTYPES)}")
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis: {axis} is not an axis of rank {x.dim()}")
    return axis


@dataclass(frozen=True)
class View:
    """Input and output as rows numbered over two dimensions.

    Attributes:
        rows: extents of the two dimensions, (outer, inner).
        n: elements of a row.
        x: strides of the input: (outer, inner, n).
        out: strides of the output: (outer, inner, n).
    """

    rows: tuple[int, int]
    n: int
    x: tuple[int, int, int]
    out: tuple[int, int, int]


def launch(x: torch.Tensor, out: torch.Tensor, *, log: bool, config: Config | None = None) -> None:
    """Softmax of `x` over its last dimension into `out`.

    Args:
        x: (…, N), at least one element.
        out: the shape of `x`.
        log: logarithm of the softmax.
        config: instead of the one that `choose` gives; for tests and tuning.
    """
    rows, strides = collapse(x.shape[:-1], x.stride()[:-1], out.stride()[:-1])
    if len(rows) > 2:
        # More dimensions than the kernels walk: through contiguous copies.
        temporary = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        launch(x.contiguous(), temporary, log=log, config=config)
        out.copy_(temporary)
        return
    view = _view(x, out, rows, strides)
    target = current(x.get_device())
    problem = _problem(x, out, view)
    config = config or choose(problem, target)
    if config.kernel == "split":
        _launch_split(x, out, view, problem, (config, target, log))
        return
    variant = build(KERNELS[config.kernel][0], problem, config, log=log)
    programs = -(-problem.rows // config.block_rows)
    Launch(variant, target, (programs, 1, 1), _values(view, problem, variant))(x, out)


def _launch_split(
    x: torch.Tensor, out: torch.Tensor, view: View, problem: Problem, how: tuple[Config, Target, bool]
) -> None:
    config, target, log = how
    partial = torch.empty((problem.rows, config.splits, 2), dtype=torch.float32, device=x.device)
    blocks = -(-problem.n // config.block_n)
    more = {"blocks_per_split": -(-blocks // config.splits)}
    grid = (problem.rows, config.splits, 1)
    for kernel, tensors in zip(KERNELS["split"], ((x, partial), (x, out, partial)), strict=True):
        variant = build(kernel, problem, config, log=log)
        Launch(variant, target, grid, _values(view, problem, variant) | more)(*tensors)


def _view(x: torch.Tensor, out: torch.Tensor, rows: Sequence[int], strides: Sequence[Sequence[int]]) -> View:
    def padded(values: Sequence[int], fill: int) -> tuple[int, int]:
        outer, inner = (*(fill,) * (2 - len(values)), *values)
        return outer, inner

    n = x.shape[-1]
    last = (1, 1) if n == 1 else (x.stride(-1), out.stride(-1))
    return View(padded(rows, 1), n, (*padded(strides[0], 0), last[0]), (*padded(strides[1], 0), last[1]))


def _problem(x: torch.Tensor, out: torch.Tensor, view: View) -> Problem:
    x_unit, out_unit = 16 // x.element_size(), 16 // out.element_size()
    is_contiguous = view.x[2] == 1 and view.out[2] == 1
    spans = [(span, x_unit) for span in (view.n, *view.x[:2])] + [(span, out_unit) for span in (view.n, *view.out[:2])]
    return Problem(
        view.rows[0] * view.rows[1],
        view.n,
        str(x.dtype).removeprefix("torch."),
        str(out.dtype).removeprefix("torch."),
        is_contiguous,
        is_contiguous and are_aligned((x, out)) and all(span % unit == 0 for span, unit in spans),
    )


def _values(view: View, problem: Problem, variant: Variant) -> dict[str, int]:
    constants = dict(variant.constants)
    x_unit, out_unit, n_unit = (int(constants.get(name, 1)) for name in ("X_UNIT", "OUT_UNIT", "N_UNIT"))
    values = {f"stride_x{dim}": stride // x_unit for dim, stride in zip("oin", view.x, strict=True)}
    values |= {f"stride_o{dim}": stride // out_unit for dim, stride in zip("oin", view.out, strict=True)}
    values |= {"rows": problem.rows, "rows_inner": view.rows[1], "n": problem.n // n_unit}
    return {name: value for name, value in values.items() if name in dict(variant.signature)}
