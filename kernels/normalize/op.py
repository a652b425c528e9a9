"""The public normalize: checks its arguments, brings rows into the kernels' form, and launches."""

from __future__ import annotations

import torch

from tilewire.kernels.normalize.configs import DTYPES, KINDS, Config, Problem, choose
from tilewire.kernels.normalize.variants import unit_of, variant
from tilewire.kernels.runtime.launch import LaunchCache, Variant, are_aligned
from tilewire.kernels.runtime.pipeline import Pipeline, Step, bound
from tilewire.kernels.runtime.rows import as_rows, row_stride
from tilewire.kernels.runtime.targets import current

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


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
) -> PreparedNormalize:
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
    if x.dim() == 0:
        raise ValueError("x: needs one dimension or more")
    for name, dtype in (("x", x.dtype), ("out_dtype", out.dtype)):
        if dtype not in _DTYPES:
            raise ValueError(f"{name}: dtype {dtype} is not one of {', '.join(DTYPES)}")
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind}")
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis: {axis} is not an axis of rank {x.dim()}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (tuple(vector.shape) != (x.shape[axis],) or vector.dtype not in _DTYPES):
            expected = f"({x.shape[axis]},) of {', '.join(DTYPES)}"
            raise ValueError(f"{name}: expected {expected}, got {tuple(vector.shape)} of {vector.dtype}")
    return axis % x.dim()


class PreparedNormalize:
    """A normalisation of given shapes, strides and options, ready to launch.

    Args:
        pipeline: The launch.
        axis: Dimension that is normalised.
        is_direct: Whether rows lie as the kernels take them; else they go through copies.
        vector_dtype: Type in which the kernel takes weight and bias.
    """

    def __init__(self, pipeline: Pipeline, axis: int, vector_dtype: torch.dtype, *, is_direct: bool) -> None:
        self._pipeline = pipeline
        self._axis = axis
        self._vector_dtype = vector_dtype
        self._is_direct = is_direct

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Binaries that a call launches."""
        return self._pipeline.variants

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Launch on the current stream."""
        weight, bias = self._vector(weight), self._vector(bias)
        if self._is_direct:
            self._pipeline(x, weight, bias, out)
            return
        rows = as_rows(x, self._axis)
        written = torch.empty(rows.shape, dtype=out.dtype, device=out.device)
        self._pipeline(rows.contiguous(), weight, bias, written)
        out.copy_(written.movedim(-1, self._axis))

    def _vector(self, vector: torch.Tensor | None) -> torch.Tensor | None:
        if vector is None or (vector.dtype == self._vector_dtype and vector.stride(0) == 1):
            return vector
        return vector.to(self._vector_dtype).contiguous()


_launches: LaunchCache[PreparedNormalize] = LaunchCache()


def prepare(
    x: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    axis: int,
    config: Config | None = None,
) -> PreparedNormalize:
    """Prepares launches on checked operands; `config` replaces the choice, for tests and tuning."""
    vectors = [vector for vector in (weight, bias) if vector is not None]
    flags = (weight is not None, bias is not None, *(vector.dtype for vector in vectors))
    shapes = (x.shape, x.stride(), out.stride(), are_aligned((x, out)))
    key = (shapes, x.dtype, out.dtype, kind, eps, flags, axis, config, x.device)

    def make() -> PreparedNormalize:
        strides = [row_stride(tensor.movedim(axis, -1)) for tensor in (x, out)]
        n = x.shape[axis]
        is_direct = None not in strides
        stride_x, stride_o = (n if stride is None or not is_direct else stride for stride in strides)
        is_same = x.dtype == out.dtype and all(vector.dtype == x.dtype for vector in vectors)
        vector_dtype = x.dtype if is_same else torch.float32
        unit = 16 // min(x.element_size(), out.element_size())
        is_aligned = not is_direct or are_aligned((x, out))
        is_aligned = is_aligned and all(span % unit == 0 for span in (n, stride_x, stride_o))
        problem = Problem(x.numel() // n, n, _name(x.dtype), _name(out.dtype), _name(vector_dtype), is_aligned)
        target = current(x.get_device())
        chosen = config or choose(problem, target)
        sizes = {
            "rows": problem.rows,
            "n": n // unit_of(problem),
            "stride_x": stride_x // unit_of(problem),
            "stride_o": stride_o // unit_of(problem),
            "eps": float(eps),
            "kind": list(KINDS).index(kind),
            "has_weight": int(weight is not None),
            "has_bias": int(bias is not None),
        }
        programs = -(-problem.rows // max(1, chosen.block_rows))
        index = x.device.index if x.device.index is not None else -1
        launch = bound(variant(problem, chosen, target), target, programs, sizes, index)
        names_of = ("x", "weight", "bias", "out")
        pipeline = Pipeline(names_of, [Step(launch, names_of)], {}, x.device)
        return PreparedNormalize(pipeline, axis, vector_dtype, is_direct=is_direct)

    return _launches.get(key, make)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
