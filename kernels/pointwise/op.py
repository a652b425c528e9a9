"""The public pointwise: checks its arguments, merges dimensions, and launches."""

from __future__ import annotations

import torch

from tilewire.kernels.pointwise.configs import BINARY, UNARY, Problem, choose
from tilewire.kernels.pointwise.variants import build
from tilewire.kernels.runtime.elementwise import Config
from tilewire.kernels.runtime.kinds import FLOATS, KINDS, name_of
from tilewire.kernels.runtime.launch import Launch, LaunchCache, are_aligned
from tilewire.kernels.runtime.pipeline import Detour, Prepared, single_entries
from tilewire.kernels.runtime.rows import check_dtype
from tilewire.kernels.runtime.strides import broadcast_shapes
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.runtime.walks import programs_of, walk_of


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
) -> Prepared:
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
    check_dtype("x", x.dtype, FLOATS)
    known = UNARY if y is None else BINARY
    if fn not in known:
        raise ValueError(f"fn: expected one of {', '.join(known)} {'without' if y is None else 'with'} y, got {fn}")
    if y is None:
        return tuple(x.shape)
    if x.dtype != y.dtype or x.device != y.device:
        raise ValueError(f"x and y: expected one dtype and device, got {x.dtype} and {y.dtype}")
    return broadcast_shapes(x.shape, y.shape)


def _check_out(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(out.shape) != shape or name_of(out.dtype) not in FLOATS:
        raise ValueError(f"out: expected {shape} of {', '.join(FLOATS)}, got {tuple(out.shape)} of {out.dtype}")


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    x: torch.Tensor,
    y: torch.Tensor | None,
    out: torch.Tensor,
    fn: str,
    scale: float,
    shift: float,
    config: Config | None = None,
) -> Prepared:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning."""
    like_y = None if y is None else (y.shape, y.stride())
    shapes = (x.shape, x.stride(), like_y, out.shape, out.stride(), are_aligned((x, y, out)))
    key = (shapes, x.dtype, out.dtype, fn, float(scale), float(shift), config, x.device)

    def make() -> Prepared:
        def launch(x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor) -> None:
            prepare(x, y, out, fn, scale, shift)(x, y, out)

        def run_entries(x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor) -> None:
            single_entries(launch, out, x.expand(out.shape), y if y is None else y.expand(out.shape))

        walk = walk_of(x, x if y is None else y, out)
        if walk is None:
            return Detour(run_entries)
        problem = walk.problem(Problem, x, y, out)
        target = current(x.get_device())
        chosen = config or choose(problem, target)
        values = walk.sizes("xyo", problem.specialization.unit) | {"scale": float(scale), "shift": float(shift)}
        values |= {"fn": (UNARY if y is None else BINARY)[fn], "out_kind": KINDS[problem.out_dtype]}
        return Launch(build(problem.specialization, chosen, target), (programs_of(problem, chosen),), values, x.device)

    return _launches.get(key, make)
