"""The public pointwise: checks its arguments, merges dimensions, and launches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewire.kernels.pointwise.configs import BINARY, DTYPES, MAX_RANK, UNARY, Config, Problem, choose
from tilewire.kernels.pointwise.variants import build, unit_of
from tilewire.kernels.runtime.kinds import KINDS
from tilewire.kernels.runtime.launch import LaunchCache, Variant, are_aligned
from tilewire.kernels.runtime.pipeline import Pipeline, Step, bound
from tilewire.kernels.runtime.strides import broadcast_shapes, broadcast_strides, collapse
from tilewire.kernels.runtime.targets import current

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_INNER = {0: "repeat", 1: "unit"}
_TENSORS = ("x", "y", "out")


def pointwise(
    x: torch.Tensor,
    fn: str,
    *,
    y: torch.Tensor | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes fn · scale + shift element by element, in float32.

    Args:
        x: Any shape and strides; float16, bfloat16 or float32.
        fn: With `y` one of `mul sub div maximum minimum`, without `exp log sqrt rsqrt abs neg relu gelu silu sigmoid tanh`.
        y: A shape that broadcasts with that of `x`; the dtype of `x`.
        scale: Factor.
        shift: Summand.
        out_dtype: Any of the same dtypes. Default: that of `x`.

    Returns:
        A tensor of the broadcast shape.

    Raises:
        ValueError: Shapes, dtypes or the function do not fit.
    """
    shape = _check(x, y, fn)
    out = torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)
    _check_out(out, shape)
    if out.numel() > 0:
        prepare_pointwise(x, out, fn=fn, y=y, scale=scale, shift=shift)(x, y, out)
    return out


def prepare_pointwise(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    fn: str,
    y: torch.Tensor | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
) -> PreparedPointwise:
    """Prepares launches for tensors of these shapes, strides, dtypes and alignment.

    Args:
        x: As in `pointwise`.
        out: The broadcast shape, not empty.
        fn: As in `pointwise`.
        y: As in `pointwise`; a launch takes another tensor like it.
        scale: As in `pointwise`.
        shift: As in `pointwise`.

    Returns:
        A launcher, called with `(x, y, out)`. It belongs to the calling thread.

    Raises:
        ValueError: As in `pointwise`, or `out` does not fit.
    """
    shape = _check(x, y, fn)
    _check_out(out, shape)
    if out.numel() == 0:
        raise ValueError("out: expected one element or more")
    return prepare(x, y, out, fn, scale, shift)


def _check(x: torch.Tensor, y: torch.Tensor | None, fn: str) -> tuple[int, ...]:
    """The broadcast shape."""
    if x.dtype not in _DTYPES:
        raise ValueError(f"x: dtype {x.dtype} is not one of {', '.join(DTYPES)}")
    known = UNARY if y is None else BINARY
    if fn not in known:
        raise ValueError(f"fn: expected one of {', '.join(known)} {'without' if y is None else 'with'} y, got {fn}")
    if y is None:
        return tuple(x.shape)
    if x.dtype != y.dtype or x.device != y.device:
        raise ValueError(f"x and y: expected one dtype and device, got {x.dtype} and {y.dtype}")
    return broadcast_shapes(x.shape, y.shape)


def _check_out(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(out.shape) != shape or out.dtype not in _DTYPES:
        raise ValueError(f"out: expected {shape} of {', '.join(DTYPES)}, got {tuple(out.shape)} of {out.dtype}")


@dataclass(frozen=True)
class View:
    """Three tensors over four dimensions, padded on the outside with extents of 1.

    Attributes:
        extents: Outermost first.
        strides: Those of `x`, `y` and the output over them, 0 where an input repeats.
    """

    extents: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


class PreparedPointwise:
    """A pointwise function of given shapes, strides and options, ready to launch.

    Args:
        pipeline: The launch; None where the dimensions do not merge into four, and each outermost entry is one of its own.
        options: Function, factor and summand.
    """

    def __init__(self, pipeline: Pipeline | None, options: tuple[str, float, float]) -> None:
        self._pipeline = pipeline
        self._options = options

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Binaries that a call launches."""
        return self._pipeline.variants if self._pipeline else ()

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor) -> None:
        """Launch on the current stream."""
        if self._pipeline is not None:
            self._pipeline(x, y, out)
            return
        outermost = next(dim for dim, extent in enumerate(out.shape) if extent > 1)
        x, y = x.expand(out.shape), y if y is None else y.expand(out.shape)
        for entry in range(out.shape[outermost]):
            part, out_part = x.select(outermost, entry), out.select(outermost, entry)
            other = None if y is None else y.select(outermost, entry)
            prepare(part, other, out_part, *self._options)(part, other, out_part)


_launches: LaunchCache[PreparedPointwise] = LaunchCache()


def prepare(
    x: torch.Tensor,
    y: torch.Tensor | None,
    out: torch.Tensor,
    fn: str,
    scale: float,
    shift: float,
    config: Config | None = None,
) -> PreparedPointwise:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning."""
    like_y = None if y is None else (y.shape, y.stride())
    shapes = (x.shape, x.stride(), like_y, out.shape, out.stride(), are_aligned((x, y, out)))
    key = (shapes, x.dtype, out.dtype, fn, float(scale), float(shift), config, x.device)

    def make() -> PreparedPointwise:
        view = _view(x, y, out)
        pipeline = None if view is None else _pipeline(x, y, out, view, (fn, scale, shift), config)
        return PreparedPointwise(pipeline, (fn, scale, shift))

    return _launches.get(key, make)


def _view(x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor) -> View | None:
    shape = tuple(out.shape)
    operands = [broadcast_strides(tensor.shape, tensor.stride(), shape) for tensor in (x, x if y is None else y)]
    extents, strides = collapse(shape, *operands, out.stride())
    if len(extents) > MAX_RANK:
        return None
    if not extents:
        return View((1,) * MAX_RANK, ((0, 0, 0, 1),) * 3)
    missing = MAX_RANK - len(extents)
    return View((*(1,) * missing, *extents), tuple((*(0,) * missing, *values) for values in strides))


def _pipeline(
    x: torch.Tensor,
    y: torch.Tensor | None,
    out: torch.Tensor,
    view: View,
    options: tuple[str, float, float],
    config: Config | None,
) -> Pipeline:
    fn, scale, shift = options
    target = current(x.get_device())
    problem = _problem(x, y, out, view)
    config = config or choose(problem, target)
    specialization = problem.specialization
    unit = unit_of(specialization)
    sizes = {
        "scale": float(scale),
        "shift": float(shift),
        "rows": problem.rows,
        "n": problem.n,
        "extent_1": view.extents[1],
        "extent_2": view.extents[2],
        "fn": (UNARY if y is None else BINARY)[fn],
        "out_kind": KINDS[problem.out_dtype],
    }
    for letter, strides in zip("xyo", view.strides, strict=True):
        sizes |= {f"stride_{letter}{dim}": strides[dim] // unit for dim in range(3)}
        sizes |= {f"stride_{letter}n": strides[3]}
    programs = -(-problem.rows // config.block_rows) * -(-problem.n // config.block_n)
    index = x.device.index if x.device.index is not None else -1
    launch = bound(build(specialization, config, target), target, programs, sizes, index)
    return Pipeline(_TENSORS, [Step(launch, _TENSORS)], {}, x.device)


def _problem(x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor, view: View) -> Problem:
    unit = 16 // x.element_size()
    is_aligned = are_aligned((x, y, out))
    is_aligned = is_aligned and all(stride % unit == 0 for strides in view.strides for stride in strides[:3])
    x_inner, y_inner, out_inner = (_INNER.get(strides[3], "any") for strides in view.strides)
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in (x, out)]
    rows = math.prod(view.extents[:3])
    inner = (x_inner, y_inner, out_inner)
    return Problem(rows, view.extents[3], names[0], names[1], y is not None, is_aligned, inner)
