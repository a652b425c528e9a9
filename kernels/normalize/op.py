"""The public normalize: checks its arguments, brings rows into the kernels' form, and launches."""

from __future__ import annotations

import functools

import torch

from tilewire.kernels.normalize.configs import KINDS, Config, Problem, choose
from tilewire.kernels.normalize.variants import variant
from tilewire.kernels.runtime.kinds import FLOATS, name_of
from tilewire.kernels.runtime.launch import Launch, LaunchCache, are_aligned
from tilewire.kernels.runtime.pipeline import Detour, Prepared
from tilewire.kernels.runtime.rows import as_rows, check_dtype, check_rows, row_stride
from tilewire.kernels.runtime.targets import current


def normalize(
    x: torch.Tensor,
    kind: str,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    axis: int = -1,
    eps: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalises along `axis` in float32: (x - mean) · scale · weight + bias.

    Args:
        x: Any shape of rank 1 or more; float16, bfloat16 or float32; any strides.
        kind: `layer`: less the mean, over √(variance + eps); `rms`: over √(mean square + eps); `l2`: over
            max(2-norm, eps).
        weight: (N,) factors along the axis; any of the same dtypes.
        bias: (N,) summands along the axis; any of the same dtypes.
        axis: Dimension of length N.
        eps: Default: 1e-5 for `layer`, 1e-6 for `rms`, 1e-12 for `l2`.
        out_dtype: Any of the same dtypes. Default: that of `x`.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: Shapes, dtypes, kind or axis do not fit.
    """
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    axis = _check(x, kind, weight, bias, axis, out)
    if out.numel() > 0:
        prepared = prepare_normalize(x, out, kind=kind, weight=weight, bias=bias, axis=axis, eps=eps)
        prepared(x, weight, bias, out)
    return out


def prepare_normalize(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    kind: str,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    axis: int = -1,
    eps: float | None = None,
) -> Prepared:
    """Prepares normalisations of tensors of these shapes, strides, dtypes and alignment.

    Args:
        x: As in `normalize`.
        out: Shape of `x`, not empty.
        kind: As in `normalize`.
        weight: As in `normalize`; a launch takes another tensor like it.
        bias: As in `normalize`; a launch takes another tensor like it.
        axis: As in `normalize`.
        eps: As in `normalize`.

    Returns:
        A launcher, called with `(x, weight, bias, out)`. It belongs to the calling thread.

    Raises:
        ValueError: As in `normalize`, or `out` does not fit.
    """
    axis = _check(x, kind, weight, bias, axis, out)
    if out.shape != x.shape or out.numel() == 0:
        raise ValueError(f"out: expected {tuple(x.shape)}, not empty, got {tuple(out.shape)}")
    return prepare(x, out, kind, KINDS[kind] if eps is None else eps, weight, bias, axis)


def _check(
    x: torch.Tensor,
    kind: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    axis: int,
    out: torch.Tensor,
) -> int:
    """The axis, counted from the front."""
    axis = check_rows(x, axis)
    check_dtype("out_dtype", out.dtype, FLOATS)
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (tuple(vector.shape) != (x.shape[axis],) or name_of(vector.dtype) not in FLOATS):
            expected = f"({x.shape[axis]},) of {', '.join(FLOATS)}"
            raise ValueError(f"{name}: expected {expected}, got {tuple(vector.shape)} of {vector.dtype}")
    return axis


_launches: LaunchCache[Prepared] = LaunchCache()


def prepare(
    x: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    axis: int,
    config: Config | None = None,
) -> Prepared:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning."""
    vectors = [vector for vector in (weight, bias) if vector is not None]
    flags = (weight is not None, bias is not None, *((vector.dtype, vector.stride(0)) for vector in vectors))
    are_vectors_aligned = are_aligned(vectors)
    shapes = (x.shape, x.stride(), out.stride(), are_aligned((x, out)), are_vectors_aligned)
    key = (shapes, x.dtype, out.dtype, kind, eps, flags, axis, config, x.device)

    def make() -> Prepared:
        strides = [row_stride(tensor.movedim(axis, -1)) for tensor in (x, out)]
        n = x.shape[axis]
        is_direct = None not in strides
        stride_x, stride_o = (n if stride is None or not is_direct else stride for stride in strides)
        is_same = x.dtype == out.dtype and all(vector.dtype == x.dtype for vector in vectors)
        vector_dtype = x.dtype if is_same else torch.float32
        unit = 16 // min(x.element_size(), out.element_size())
        is_aligned = are_vectors_aligned and (not is_direct or are_aligned((x, out)))
        is_aligned = is_aligned and all(span % unit == 0 for span in (n, stride_x, stride_o))
        names = (name_of(x.dtype), name_of(out.dtype), name_of(vector_dtype))
        problem = Problem(x.numel() // n, n, *names, is_aligned)
        target = current(x.get_device())
        chosen = config or choose(problem, target)
        sizes = {
            "rows": problem.rows,
            "n": n // problem.unit,
            "stride_x": stride_x // problem.unit,
            "stride_o": stride_o // problem.unit,
            "eps": float(eps),
            "kind": list(KINDS).index(kind),
            "has_weight": int(weight is not None),
            "has_bias": int(bias is not None),
        }
        programs = -(-problem.rows // max(1, chosen.block_rows))
        launch = Launch(variant(problem, chosen, target), (programs,), sizes, x.device)
        if is_direct and all(vector.dtype == vector_dtype and vector.stride(0) == 1 for vector in vectors):
            return launch
        return Detour(functools.partial(_through_copies, launch, axis, vector_dtype, is_direct), launch)

    return _launches.get(key, make)


def _through_copies(
    launch: Launch,
    axis: int,
    vector_dtype: torch.dtype,
    is_direct: bool,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launches on a weight and a bias of `vector_dtype` and, unless `is_direct`, on rows that lie as the kernels take them."""
    weight, bias = (vector if vector is None else vector.to(vector_dtype).contiguous() for vector in (weight, bias))
    if is_direct:
        launch(x, weight, bias, out)
        return
    rows = as_rows(x, axis)
    written = torch.empty(rows.shape, dtype=out.dtype, device=out.device)
    launch(rows.contiguous(), weight, bias, written)
    out.copy_(written.movedim(-1, axis))
