"""The public add: checks its arguments, merges dimensions, and launches."""

from __future__ import annotations

import torch

from tilewire.kernels.add.configs import DTYPES, KINDS, Problem, choose
from tilewire.kernels.add.variants import build
from tilewire.kernels.runtime.elementwise import Config
from tilewire.kernels.runtime.kinds import name_of
from tilewire.kernels.runtime.launch import Launch, LaunchCache, are_aligned
from tilewire.kernels.runtime.pipeline import Detour, Prepared, single_entries
from tilewire.kernels.runtime.rows import check_dtype
from tilewire.kernels.runtime.strides import broadcast_shapes
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.runtime.walks import programs_of, walk_of


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
    if name_of(out_dtype) not in DTYPES:
        raise ValueError(f"out_dtype: expected one of {', '.join(DTYPES)}, got {out_dtype}")
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=a.device)
    elif tuple(out.shape) != shape or out.dtype != out_dtype or out.device != a.device:
        raise ValueError(f"out: expected {shape} of {out_dtype}, got {tuple(out.shape)} of {out.dtype}")
    if out.numel() > 0:
        prepare(a, b, out, alpha=alpha)(a, b, out)
    return out


def prepare_add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, alpha: float = 1) -> Prepared:
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
    if tuple(out.shape) != shape or out.numel() == 0 or name_of(out.dtype) not in DTYPES:
        raise ValueError(f"out: expected {shape}, not empty, got {tuple(out.shape)} of {out.dtype}")
    prepared = prepare(a, b, out, alpha=alpha)
    if not prepared.variants:
        raise ValueError("the dimensions do not merge into four: use add")
    return prepared


def _check(a: torch.Tensor, b: torch.Tensor, alpha: float) -> tuple[int, ...]:
    """The broadcast shape."""
    check_dtype("a", a.dtype, DTYPES)
    if a.dtype != b.dtype:
        raise ValueError(f"a and b must have one dtype, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"a and b must be on one device, got {a.device} and {b.device}")
    if not a.is_floating_point() and alpha != int(alpha):
        raise ValueError(f"alpha: integers need a whole factor, got {alpha}")
    return broadcast_shapes(a.shape, b.shape)


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, alpha: float = 1, config: Config | None = None
) -> Prepared:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning."""
    shapes = (a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride())
    key = (shapes, a.dtype, out.dtype, are_aligned((a, b, out)), alpha, config, a.device)

    def make() -> Prepared:
        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            prepare(a, b, out, alpha=alpha, config=config)(a, b, out)

        def run_entries(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            single_entries(launch, out, a.expand(out.shape), b.expand(out.shape))

        walk = walk_of(a, b, out)
        if walk is None:
            return Detour(run_entries)
        problem = walk.problem(Problem, a, b, out)
        target = current(a.get_device())
        chosen = config or choose(problem, target)
        values = walk.sizes("abo", problem.specialization.unit) | {"out_kind": KINDS[problem.out_dtype]}
        values["alpha"] = float(alpha) if a.is_floating_point() else int(alpha)
        return Launch(build(problem.specialization, chosen, target), (programs_of(problem, chosen),), values, a.device)

    return _launches.get(key, make)
