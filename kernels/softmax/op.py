"""The public softmax: checks its arguments, brings any strides and axis into the kernels' form, and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tilewire.kernels.runtime.launch import Launch, LaunchCache, Variant, are_aligned, current_stream
from tilewire.kernels.runtime.strides import collapse
from tilewire.kernels.runtime.targets import Target, current
from tilewire.kernels.runtime.workspace import workspace
from tilewire.kernels.softmax.configs import DTYPES, Config, Problem
from tilewire.kernels.softmax.select import select, select_invariant
from tilewire.kernels.softmax.variants import KERNELS, build, unit_of

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


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
    axis = _check(x, axis)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if out_dtype not in _DTYPES:
        raise ValueError(f"out_dtype: expected one of {', '.join(DTYPES)}, got {out_dtype}")
    if out is None:
        out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    elif out.shape != x.shape or out.dtype != out_dtype or out.device != x.device:
        raise ValueError(f"out: expected {tuple(x.shape)} of {out_dtype}, got {tuple(out.shape)} of {out.dtype}")
    if out.numel() > 0:
        rows, out_rows = x.movedim(axis, -1), out.movedim(axis, -1)
        launch(rows, out_rows, log=log, config="invariant" if batch_invariant else None)
    return out


def prepare_softmax(
    x: torch.Tensor, out: torch.Tensor, *, axis: int = -1, log: bool = False, batch_invariant: bool = False
) -> PreparedSoftmax:
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
    _check(x, axis)
    if out.shape != x.shape or out.numel() == 0 or out.dtype not in _DTYPES:
        raise ValueError(f"out: expected {tuple(x.shape)}, not empty, got {tuple(out.shape)} of {out.dtype}")
    config: Literal["invariant"] | None = "invariant" if batch_invariant else None
    prepared = prepare(x.movedim(axis, -1), out.movedim(axis, -1), log=log, config=config)
    if prepared is None:
        raise ValueError("the dimensions beside the axis do not merge into two: use softmax")
    return prepared


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


class PreparedSoftmax:
    """A softmax of given shapes, strides and options, ready to launch on any tensors that have them.

    Not for several threads at once.

    Args:
        view: shapes and strides.
        problem: what of them the kernel depends on.
        config: how to compute it.
        device: where.
    """

    def __init__(self, view: View, problem: Problem, config: Config, device: torch.device) -> None:
        index = device.index if device.index is not None else -1
        target = current(index)
        self.config = config
        self._device = device
        self._index = index
        self._num_partials = _num_partials(problem, config, target)
        self._launches = []
        for kernel in KERNELS[config.kernel]:
            variant = build(kernel, problem, config, target)
            values = _values(view, problem, config, variant)
            self._launches.append(Launch(variant, target, _grid(problem, config, target), values, index))

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Variants that are launched."""
        return tuple(launch.variant for launch in self._launches)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launch on the current stream. Shapes, strides, dtypes and alignment must be those that were prepared."""
        if not self._num_partials:
            self._launches[0](x, out)
            return
        stream = current_stream(self._index) if self._launches[0].is_bound else 0
        partial, count = workspace(self._device, stream, self._num_partials, 1)
        if self.config.kernel == "cooperative":
            self._launches[0](x, out, partial, count)
            return
        self._launches[0](x, partial)
        self._launches[1](x, out, partial)


def _num_partials(problem: Problem, config: Config, target: Target) -> int:
    """Floats of scratch."""
    if config.kernel == "split":
        return 2 * problem.rows * config.splits
    return 4 * target.num_sms * config.programs_per_sm if config.kernel == "cooperative" else 0


_launches: LaunchCache[PreparedSoftmax | None] = LaunchCache()


def launch(
    x: torch.Tensor, out: torch.Tensor, *, log: bool, config: Config | Literal["invariant"] | None = None
) -> None:
    """Softmax of `x` over its last dimension into `out`.

    Args:
        x: (…, N), at least one element.
        out: the shape of `x`.
        log: logarithm of the softmax.
        config: instead of the one that `select` gives, for tests and tuning; `invariant` for `select_invariant`.
    """
    prepared = prepare(x, out, log=log, config=config)
    if prepared is not None:
        prepared(x, out)
        return
    # More dimensions than the kernels walk: through contiguous copies.
    temporary = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    launch(x.contiguous(), temporary, log=log, config=config)
    out.copy_(temporary)


def prepare(
    x: torch.Tensor, out: torch.Tensor, *, log: bool = False, config: Config | Literal["invariant"] | None = None
) -> PreparedSoftmax | None:
    """Returns the launcher, bound but for the addresses; None where the kernels cannot walk the rows."""
    key = (x.shape, x.stride(), out.stride(), x.dtype, out.dtype, are_aligned((x, out)), log, config, x.device)

    def make() -> PreparedSoftmax | None:
        rows, strides = collapse(x.shape[:-1], x.stride()[:-1], out.stride()[:-1])
        if len(rows) > 2:
            return None
        view = _view(x, out, rows, strides)
        problem = _problem(x, out, view, log=log)
        target = current(x.get_device())
        chosen = select_invariant(problem, target) if config == "invariant" else config or select(problem, target)
        return PreparedSoftmax(view, problem, chosen, x.device)

    return _launches.get(key, make)


def _grid(problem: Problem, config: Config, target: Target) -> tuple[int, int, int]:
    if config.kernel == "split":
        return problem.rows, config.splits, 1
    if config.kernel == "cooperative":
        groups = target.num_sms * config.programs_per_sm // config.splits
        return min(problem.rows, groups) * config.splits, 1, 1
    return -(-problem.rows // config.block_rows), 1, 1


def _view(x: torch.Tensor, out: torch.Tensor, rows: Sequence[int], strides: Sequence[Sequence[int]]) -> View:
    def padded(values: Sequence[int], fill: int) -> tuple[int, int]:
        outer, inner = (*(fill,) * (2 - len(values)), *values)
        return outer, inner

    n = x.shape[-1]
    last = (1, 1) if n == 1 else (x.stride(-1), out.stride(-1))
    return View(padded(rows, 1), n, (*padded(strides[0], 0), last[0]), (*padded(strides[1], 0), last[1]))


def _problem(x: torch.Tensor, out: torch.Tensor, view: View, *, log: bool) -> Problem:
    unit = 16 // x.element_size()
    is_contiguous = view.x[2] == 1 and view.out[2] == 1
    is_aligned = are_aligned((x, out)) and all(span % unit == 0 for span in (view.n, *view.x[:2], *view.out[:2]))
    return Problem(
        view.rows[0] * view.rows[1],
        view.n,
        str(x.dtype).removeprefix("torch."),
        str(out.dtype).removeprefix("torch."),
        is_contiguous,
        is_contiguous and is_aligned,
        log,
    )


def _values(view: View, problem: Problem, config: Config, variant: Variant) -> dict[str, int]:
    unit = unit_of(problem)
    values = {f"stride_x{dim}": stride // unit for dim, stride in zip("oin", view.x, strict=True)}
    values |= {f"stride_o{dim}": stride // unit for dim, stride in zip("oin", view.out, strict=True)}
    values |= {"rows": problem.rows, "rows_inner": view.rows[1], "n": problem.n // unit}
    values["log"] = int(problem.log)
    values |= {"group_size": config.splits, "blocks_per_split": -(-problem.n // (config.block_n * config.splits))}
    return {name: value for name, value in values.items() if name in dict(variant.signature)}
