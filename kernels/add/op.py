"""The public add: checks its arguments, merges dimensions, and launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewire.kernels.add.configs import DTYPES, KINDS, MAX_RANK, Config, Problem, choose
from tilewire.kernels.add.variants import build, unit_of
from tilewire.kernels.runtime.launch import Launch, LaunchCache, are_aligned
from tilewire.kernels.runtime.strides import broadcast_shapes, broadcast_strides, collapse
from tilewire.kernels.runtime.targets import current

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


def prepare_add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, alpha: float = 1) -> Launch:
    """A launcher for additions like this one: the same shapes, strides, dtypes, alignment and alpha.

    Calling it with `(a, b, out)` skips every check and choice. It belongs to the calling thread.

    Args:
        a: as in `add`.
        b: as in `add`.
        out: the broadcast shape, not empty.
        alpha: as in `add`.

    Returns:
        The launcher. Nothing is launched yet, but the kernel is compiled and loaded.

    Raises:
        ValueError: as in `add`, or the result is empty or its dimensions do not merge into four.
    """
    shape = _check(a, b, alpha)
    if tuple(out.shape) != shape or out.numel() == 0 or out.dtype not in _DTYPES:
        raise ValueError(f"out: expected {shape}, not empty, got {tuple(out.shape)} of {out.dtype}")
    prepared = prepare(a, b, out, alpha=alpha)
    if prepared is None:
        raise ValueError("the dimensions do not merge into four: use add")
    return prepared


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


_launches: LaunchCache[Launch | None] = LaunchCache()


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
    prepared = prepare(a, b, out, alpha=alpha, config=config)
    if prepared is not None:
        prepared(a, b, out)
        return
    # More dimensions than the kernel walks: one launch for each entry of the outermost.
    shape = tuple(out.shape)
    outermost = next(dim for dim, extent in enumerate(shape) if extent > 1)
    a, b = a.expand(shape), b.expand(shape)
    for entry in range(shape[outermost]):
        parts = (tensor.select(outermost, entry) for tensor in (a, b, out))
        launch(*parts, alpha=alpha, config=config)


def prepare(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, alpha: float = 1, config: Config | None = None
) -> Launch | None:
    """Returns the launcher, called with (a, b, out); None where it would take several launches."""
    shapes = (a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride())
    key = (shapes, a.dtype, out.dtype, are_aligned((a, b, out)), alpha, config, a.device)

    def make() -> Launch | None:
        shape = tuple(out.shape)
        strides_a = broadcast_strides(a.shape, a.stride(), shape)
        strides_b = broadcast_strides(b.shape, b.stride(), shape)
        extents, strides = collapse(shape, strides_a, strides_b, out.stride())
        if len(extents) > MAX_RANK:
            return None
        view = _view(extents, strides)
        problem = _problem(a, b, out, view)
        return _bind(view, problem, config, a, alpha)

    return _launches.get(key, make)


def _bind(view: View, problem: Problem, config: Config | None, a: torch.Tensor, alpha: float) -> Launch:
    target = current(a.get_device())
    config = config or choose(problem, target)
    variant = build(problem.specialization, config, target)
    row_blocks, column_blocks = -(-problem.rows // config.block_rows), -(-problem.n // config.block_n)
    values = _values(view, problem) | {"alpha": float(alpha) if a.is_floating_point() else int(alpha)}
    return Launch(variant, target, (row_blocks * column_blocks, 1, 1), values, a.get_device())


def _view(extents: Sequence[int], strides: Sequence[Sequence[int]]) -> View:
    def padded(values: Sequence[int], fill: int) -> tuple[int, ...]:
        return (*(fill,) * (MAX_RANK - len(values)), *values)

    if not extents:
        return View((1,) * MAX_RANK, *((0, 0, 0, 1) for _ in range(3)))
    return View(padded(extents, 1), *(padded(values, 0) for values in strides))


def _problem(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, view: View) -> Problem:
    unit = 16 // a.element_size()
    outer = (*view.a[:3], *view.b[:3], *view.out[:3])
    is_aligned = are_aligned((a, b, out)) and all(stride % unit == 0 for stride in outer)
    a_inner, b_inner, out_inner = (_INNER.get(strides[3], "any") for strides in (view.a, view.b, view.out))
    return Problem(
        math.prod(view.extents[:3]),
        view.extents[3],
        str(a.dtype).removeprefix("torch."),
        str(out.dtype).removeprefix("torch."),
        is_aligned,
        *(a_inner, b_inner, out_inner),
        outer_rank=3 if math.prod(view.extents[:2]) > 1 else int(view.extents[2] > 1),
    )


def _values(view: View, problem: Problem) -> dict[str, int]:
    unit = unit_of(problem.specialization)
    values = {"rows": problem.rows, "n": problem.n, "extent_1": view.extents[1], "extent_2": view.extents[2]}
    for letter, strides in (("a", view.a), ("b", view.b), ("o", view.out)):
        outer = {f"stride_{letter}{dim}": strides[dim] // unit for dim in range(3)}
        values |= outer | {f"stride_{letter}n": strides[3]}
    return values | {"out_kind": KINDS[problem.out_dtype]}
