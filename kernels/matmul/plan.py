"""From checked tensors to a launch: merging batch dimensions, reading layouts, binding kernel arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.launching import Launch, are_aligned
from kernels.matmul.configs import Config, Finish, Problem, cdiv, choose
from kernels.matmul.variants import build, units_of
from kernels.strides import broadcast_strides, collapse
from kernels.targets import current
from kernels.workspace import workspace


@dataclass(frozen=True)
class Epilogue:
    """What follows the product. Scales are None, or hold one element or one per row (a) or column (b)."""

    bias: torch.Tensor | None = None
    a_scale: torch.Tensor | None = None
    b_scale: torch.Tensor | None = None
    activation: str = "none"

    @property
    def finish(self) -> Finish:
        """What of it the choice of a binary depends on."""
        bias_dtype = "" if self.bias is None else str(self.bias.dtype).removeprefix("torch.")
        return Finish(bias_dtype, _num_scales(self.a_scale), _num_scales(self.b_scale), self.activation)


def _num_scales(scale: torch.Tensor | None) -> str:
    if scale is None:
        return "none"
    return "one" if scale.numel() == 1 else "each"


@dataclass(frozen=True)
class View:
    """Three tensors as one batched product over at most two batch dimensions.

    Attributes:
        sizes: (m, n, k).
        batch: extents of the batch dimensions, (outer, inner).
        a: strides of op(a): (outer, inner, m, k).
        b: strides of op(b): (outer, inner, k, n).
        out: strides of the output: (outer, inner, m, n).
    """

    sizes: tuple[int, int, int]
    batch: tuple[int, int]
    a: tuple[int, int, int, int]
    b: tuple[int, int, int, int]
    out: tuple[int, int, int, int]


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    precision: str,
    config: Config | None = None,
) -> None:
    """Run out = act((a @ b) * scales + bias) on checked, already transposed operands.

    Args:
        a: (…, M, K).
        b: (…, K, N).
        out: (…, M, N), at least one element.
        epilogue: bias, scales, activation.
        precision: for float32 inputs.
        config: instead of the one that `choose` gives; for tests and tuning.
    """
    shape = tuple(out.shape[:-2])
    strides_a = broadcast_strides(a.shape[:-2], a.stride()[:-2], shape)
    strides_b = broadcast_strides(b.shape[:-2], b.stride()[:-2], shape)
    batch, strides = collapse(shape, strides_a, strides_b, out.stride()[:-2])
    if len(batch) > 2:
        # More batch dimensions than the kernel walks: one launch for each entry of the outermost.
        a, b = a.expand(*shape, *a.shape[-2:]), b.expand(*shape, *b.shape[-2:])
        outermost = next(dim for dim, extent in enumerate(shape) if extent > 1)
        for entry in range(shape[outermost]):
            part_a, part_b, part_out = (tensor.select(outermost, entry) for tensor in (a, b, out))
            launch(part_a, part_b, part_out, epilogue, precision, config)
        return
    view = _fold(_view(a, b, out, batch, strides), epilogue)
    _bind(a, b, out, view, epilogue, precision, config)


def _view(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, batch: Sequence[int], strides: Sequence[Sequence[int]]
) -> View:
    def padded(values: Sequence[int], fill: int) -> tuple[int, int]:
        outer, inner = (*(fill,) * (2 - len(values)), *values)
        return outer, inner

    (m, k), n = a.shape[-2:], b.shape[-1]
    of_a, of_b, of_out = (padded(values, 0) for values in strides)
    return View(
        (m, n, k),
        padded(batch, 1),
        (*of_a, _step(a, -2), _step(a, -1)),
        (*of_b, _step(b, -2), _step(b, -1)),
        (*of_out, _step(out, -2), out.stride(-1)),
    )


def _step(tensor: torch.Tensor, dim: int) -> int:
    """The stride of `dim`; 0 where it is never walked, so that a stray value does not look unaligned."""
    return 0 if tensor.shape[dim] == 1 else tensor.stride(dim)


def _fold(view: View, epilogue: Epilogue) -> View:
    """One taller product where every batch entry uses the same `b` and the rows follow one another."""
    (m, n, k), (outer, inner) = view.sizes, view.batch
    is_row_scaled = epilogue.a_scale is not None and epilogue.a_scale.numel() > 1
    follows = view.a[1] == m * view.a[2] and view.out[1] == m * view.out[2]
    if outer > 1 or inner == 1 or view.b[1] != 0 or not follows or is_row_scaled:
        return view
    return View((inner * m, n, k), (1, 1), (0, 0, *view.a[2:]), view.b, (0, 0, *view.out[2:]))


def _bind(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    view: View,
    epilogue: Epilogue,
    precision: str,
    config: Config | None,
) -> None:
    target = current(a.get_device())
    problem = _problem(a, b, out, view, precision)
    config = config or choose(problem, target)
    variant = build(problem, epilogue.finish, config, target)
    prepared = Launch(variant, target, _grid(problem, config), _values(view, problem))
    partial, count = workspace(a.device, *_workspace_sizes(problem, config))
    if partial is not None and a.dtype == torch.int8:
        partial = partial.view(torch.int32)
    prepared(a, b, out, epilogue.bias, epilogue.a_scale, epilogue.b_scale, partial, count)


def _problem(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, view: View, precision: str) -> Problem:
    m, n, k = view.sizes
    a_major = _major(view.a[2:], ("m", "k"), prefer="k")
    b_major = _major(view.b[2:], ("k", "n"), prefer="n")
    in_unit, out_unit = 16 // a.element_size(), 16 // out.element_size()
    extents = {"m": m, "n": n, "k": k, "any": 1}
    spans_a = (_other(view.a, a_major, "mk"), extents[a_major], *view.a[:2])
    spans_b = (_other(view.b, b_major, "kn"), extents[b_major], *view.b[:2])
    is_aligned_in = all(span % in_unit == 0 for span in (*spans_a, *spans_b))
    is_aligned_out = view.out[3] == 1 and all(span % out_unit == 0 for span in (*view.out[:3], n))
    return Problem(
        m,
        n,
        k,
        math.prod(view.batch),
        str(a.dtype).removeprefix("torch."),
        str(out.dtype).removeprefix("torch."),
        a_major,
        b_major,
        precision,
        is_aligned_in and are_aligned((a, b)),
        is_aligned_out and are_aligned((out,)),
    )


def _major(strides: Sequence[int], names: tuple[str, str], prefer: str) -> str:
    """The dimension with stride 1, `prefer` when both have it."""
    unit = [name for name, stride in zip(names, strides, strict=True) if stride == 1]
    return "any" if not unit else prefer if prefer in unit else unit[0]


def _other(strides: Sequence[int], major: str, names: str) -> int:
    """Stride of the dimension that is not `major`; 1, which divides nothing, when neither is."""
    return 1 if major == "any" else strides[2 + 1 - names.index(major)]


def _grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    return config.tiles(problem), config.split_k, 1


def _values(view: View, problem: Problem) -> dict[str, int]:
    units = units_of(problem)
    m, n, k = view.sizes
    names = ("az", "ay", "am", "ak", "bz", "by", "bk", "bn")
    strides = dict(zip(names, (*view.a, *view.b), strict=True))
    values = {f"stride_{name}": stride // units["in"] for name, stride in strides.items()}
    outs = dict(zip(("oz", "oy", "om", "on"), view.out, strict=True))
    values |= {f"stride_{name}": stride // units["out"] for name, stride in outs.items()}
    values |= {"m": cdiv(m, units["m"]), "n": cdiv(n, units["n"]), "k": cdiv(k, units["k"])}
    return values | {"batch_inner": view.batch[1]}


def _workspace_sizes(problem: Problem, config: Config) -> tuple[int, int]:
    """Partial sums and counters."""
    if config.split_k == 1:
        return 0, 0
    tiles = config.tiles(problem)
    return tiles * config.split_k * config.block_m * config.block_n, tiles
