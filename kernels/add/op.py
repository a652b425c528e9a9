"""The public add: checks its arguments, merges dimensions, and launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.add.configs import DTYPES, MAX_RANK, Config, Problem, choose
from kernels.add.variants import build
from kernels.launching import Launch, Variant, are_aligned
from kernels.strides import broadcast_shapes, broadcast_strides, collapse
from kernels.targets import current

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_INNER = {0: "repeat", 1: "unit"}


def add(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    alpha: float = 1,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A + alpha * b with NumPy broadcasting.

    Computed in float32 for float16 and bfloat16, else in the inputs' own dtype (integers wrap around), and converted
    once to the output's.

    Args:
        a: any shape and strides; float16, bfloat16, float32, float64, int32 or int64.
        b: a shape that broadcasts with that of `a`; the dtype of `a`.
        alpha: factor of `b`; whole for integers.
        out_dtype: any of the same dtypes. Default: that of the inputs.
        out: written instead of a new tensor; the broadcast shape, of the output dtype, any strides.

    Returns:
        A tensor of the broadcast shape.

    Raises:
        ValueError: shapes, dtypes, `alpha` or `out` do not fit together.
    """
    shape = _check(a, b, alpha)
    out_dtype = a.dtype if out_dtype is None else out_dtype
    if out_dtype not in _DTYPES:
        raise ValueError(f"out_dtype: expected one of {', '.join(DTYPES)}, got {out_dtype}")
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=a.device)
    elif tuple(out.shape) != shape or out.dtype != out_dtype or out.device != a.device:
        raise ValueError(f"out: expected {shape} of {out_dtype}, got {tuple(out.shape)} of {out.dtype}")
    if out.numel() > 0:
        launch(a, b, out, alpha=alpha)
    return out


def _check(a: torch.Tensor, b: torch.Tensor, alpha: float) -> tuple[int, ...]:
    """The broadcast shape."""
    if a.dtype not in _DTYPES:
        raise ValueError(f"a: dtype {a.dtype} is not one of {', '.join(DTYPES)}")
    if a.dtype != b.dtype:
        raise ValueError(f"a and b must have one dtype, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"a and b must be on one device, got {a.device} and {b.device}")
    if not a.is_floating_point() and alpha != int(alpha):
        raise ValueError(f"alpha: integers need a whole factor, got {alpha}")
    return broadcast_shapes(a.shape, b.shape)


@dataclass(frozen=True)
class View:
    """Three tensors over four dimensions, padded on the outside with extents of 1.

    Attributes:
        extents: outermost first.
        a: strides of `a` over them, 0 where it repeats.
        b: strides of `b`.
        out: strides of the output.
    """

    extents: tuple[int, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]


def launch(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, alpha: float = 1, config: Config | None = None
) -> None:
    """Run out = a + alpha * b on checked operands.

    Args:
        a: broadcasts to the shape of `out`.
        b: broadcasts to the shape of `out`.
        out: at least one element.
        alpha: factor of `b`.
        config: instead of the one that `choose` gives; for tests and tuning.
    """
    shape = tuple(out.shape)
    strides_a = broadcast_strides(a.shape, a.stride(), shape)
    strides_b = broadcast_strides(b.shape, b.stride(), shape)
    extents, strides = collapse(shape, strides_a, strides_b, out.stride())
    if len(extents) > MAX_RANK:
        # More dimensions than the kernel walks: one launch for each entry of the outermost.
        outermost = next(dim for dim, extent in enumerate(shape) if extent > 1)
        a, b = a.expand(shape), b.expand(shape)
        for entry in range(shape[outermost]):
            parts = (tensor.select(outermost, entry) for tensor in (a, b, out))
            launch(*parts, alpha=alpha, config=config)
        return
    view = _view(extents, strides)
    target = current(a.get_device())
    problem = _problem(a, b, out, view)
    config = config or choose(problem, target)
    variant = build(problem, config)
    row_blocks, column_blocks = -(-problem.rows // config.block_rows), -(-problem.n // config.block_n)
    values = _values(view, problem, variant) | {"alpha": float(alpha) if a.is_floating_point() else int(alpha)}
    Launch(variant, target, (row_blocks * column_blocks, 1, 1), values)(a, b, out)


def _view(extents: Sequence[int], strides: Sequence[Sequence[int]]) -> View:
    def padded(values: Sequence[int], fill: int) -> tuple[int, ...]:
        return (*(fill,) * (MAX_RANK - len(values)), *values)

    if not extents:
        return View((1,) * MAX_RANK, *((0, 0, 0, 1) for _ in range(3)))
    return View(padded(extents, 1), *(padded(values, 0) for values in strides))


def _problem(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, view: View) -> Problem:
    in_unit, out_unit = 16 // a.element_size(), 16 // out.element_size()
    is_aligned = are_aligned((a, b, out)) and all(stride % in_unit == 0 for stride in (*view.a[:3], *view.b[:3]))
    is_aligned = is_aligned and all(stride % out_unit == 0 for stride in view.out[:3])
    return Problem(
        math.prod(view.extents[:3]),
        view.extents[3],
        str(a.dtype).removeprefix("torch."),
        str(out.dtype).removeprefix("torch."),
        is_aligned,
        *(_INNER.get(strides[3], "any") for strides in (view.a, view.b, view.out)),
    )


def _values(view: View, problem: Problem, variant: Variant) -> dict[str, int]:
    constants = dict(variant.constants)
    values = {"rows": problem.rows, "n": problem.n, "extent_1": view.extents[1], "extent_2": view.extents[2]}
    operands = (("a", view.a, "IN_UNIT"), ("b", view.b, "IN_UNIT"), ("o", view.out, "OUT_UNIT"))
    for letter, strides, unit in operands:
        outer = {f"stride_{letter}{dim}": strides[dim] // constants[unit] for dim in range(3)}
        values |= outer | {f"stride_{letter}n": strides[3]}
    return values
