"""The public matmul: checks its arguments, brings any strides into the kernels' form, and launches one."""

from __future__ import annotations

import math

import torch

from tilewire.kernels.matmul.configs import ACTIVATIONS, MAX_INT8_K, OUT_DTYPES, PRECISIONS, known_precision
from tilewire.kernels.matmul.plan import Epilogue, prepare
from tilewire.kernels.runtime.kinds import name_of
from tilewire.kernels.runtime.pipeline import Detour, Prepared
from tilewire.kernels.runtime.rows import check_counts, check_dtype, check_pair, output
from tilewire.kernels.runtime.strides import broadcast_shapes

_BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    precision: str = "ieee",
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """act((op(a) @ op(b)) * a_scale * b_scale + bias), accumulated in float32 (int32 for int8).

    Args:
        a: (…, M, K), or (…, K, M) with `transpose_a`; float16, bfloat16, float32, int8, float8_e4m3fn or float8_e5m2;
            any strides.
        b: (…, K, N), or (…, N, K) with `transpose_b`; the dtype of `a`. Leading dimensions broadcast.
        bias: (N,), float16, bfloat16 or float32; int32 when the output is int32.
        a_scale: float32, 1 or M elements.
        b_scale: float32, 1 or N elements.
        transpose_a: swap the last two dimensions of `a`.
        transpose_b: swap the last two dimensions of `b`.
        activation: `none`, `relu`, `leaky_relu` (slope 0.01), `gelu` (tanh form), `silu`, `sigmoid` or `tanh`; only
            `none` and `relu` when the output is int32.
        out_dtype: float16, bfloat16 or float32, for int8 also int32. Default: that of the inputs; int32 for int8,
            bfloat16 for float8.
        precision: `ieee`, `tf32x3` or `tf32`, for float32 inputs; `ieee` or `fast` for float8, whose sums then stay in the
            matrix unit. Other inputs have one precision.
        batch_invariant: give each row the same bits beside any other rows and products, at the price of speed where
            rows are few.
        out: written instead of a new tensor; (…, M, N) of the output dtype, any strides.

    Returns:
        (…, M, N).

    Raises:
        ValueError: shapes, dtypes, options or `out` do not fit together.
    """
    a = a.mT if transpose_a else a
    b = b.mT if transpose_b else b
    epilogue = Epilogue(bias, a_scale, b_scale, activation)
    shape, out_dtype = check_product(a, b, epilogue, out_dtype, precision)
    out = output(out, shape, out_dtype, a.device)
    if out.numel() > 0:
        precision = known_precision(name_of(a.dtype), precision)
        prepared = prepare(a, b, out, epilogue, precision, "invariant" if batch_invariant else None)
        prepared(a, b, out, bias, a_scale, b_scale)
    return out


def prepare_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    activation: str = "none",
    precision: str = "ieee",
    batch_invariant: bool = False,
) -> Prepared:
    """A launcher for products like this one: the same shapes, strides, dtypes, alignment and options.

    Calling it with `(a, b, out, bias, a_scale, b_scale)` skips every check and choice: about 6 µs of host time. It
    belongs to the calling thread.

    Args:
        a: (…, M, K); for transposed operands pass the transposed view.
        b: (…, K, N).
        out: (…, M, N), not empty.
        bias: as in `matmul`.
        a_scale: as in `matmul`.
        b_scale: as in `matmul`.
        activation: as in `matmul`.
        precision: as in `matmul`.
        batch_invariant: as in `matmul`.

    Returns:
        The launcher. Nothing is launched yet, but the kernel is compiled and loaded.

    Raises:
        ValueError: as in `matmul`, or the product is empty or needs several launches (batch dimensions that do not
            merge into two).
    """
    epilogue = Epilogue(bias, a_scale, b_scale, activation)
    shape, _ = check_product(a, b, epilogue, out.dtype, precision)
    if tuple(out.shape) != shape or out.numel() == 0:
        raise ValueError(f"out: expected {shape}, not empty, got {tuple(out.shape)}")
    precision = known_precision(name_of(a.dtype), precision)
    prepared = prepare(a, b, out, epilogue, precision, "invariant" if batch_invariant else None)
    if isinstance(prepared, Detour):
        raise ValueError("the batch dimensions do not merge into two: use matmul")  # noqa: TRY004 - it is the shapes
    return prepared


def check_product(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue,
    out_dtype: torch.dtype | None,
    precision: str,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Check a product whose operands are already transposed.

    Args:
        a: (…, M, K).
        b: (…, K, N).
        epilogue: what follows.
        out_dtype: as in `matmul`.
        precision: as in `matmul`.

    Returns:
        Shape and dtype of the output.

    Raises:
        ValueError: as in `matmul`.
    """
    shape = _check_operands(a, b)
    out_dtype = _check_out_dtype(a, out_dtype)
    _check_epilogue(epilogue, shape, out_dtype)
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    return shape, out_dtype


def _check_operands(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The shape of the product."""
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError(f"a and b need two dimensions or more, got {tuple(a.shape)} and {tuple(b.shape)}")
    check_dtype("a", a.dtype, tuple(OUT_DTYPES))
    check_pair("a and b", a, b)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"op(a) has K = {a.shape[-1]}, op(b) has K = {b.shape[-2]}")
    if a.dtype == torch.int8 and a.shape[-1] > MAX_INT8_K:
        raise ValueError(f"int8: K = {a.shape[-1]} could overflow int32, the most is {MAX_INT8_K}")
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if a.shape[-2] and b.shape[-1] and 0 not in batch:
        check_counts("a", rows=a.shape[-2], columns=a.shape[-1], matrices=math.prod(batch))
        check_counts("b", columns=b.shape[-1])
    return (*batch, a.shape[-2], b.shape[-1])


def _check_out_dtype(a: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    allowed = OUT_DTYPES[name_of(a.dtype)]
    if out_dtype is None:
        default: torch.dtype = getattr(torch, allowed[0])
        return default
    if name_of(out_dtype) not in allowed:
        raise ValueError(f"out_dtype: expected one of {', '.join(allowed)} for {a.dtype} inputs, got {out_dtype}")
    return out_dtype


def _check_epilogue(epilogue: Epilogue, shape: tuple[int, ...], out_dtype: torch.dtype) -> None:
    m, n = shape[-2:]
    is_integer = out_dtype == torch.int32
    if epilogue.activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {epilogue.activation!r}")
    if is_integer and epilogue.activation not in ("none", "relu"):
        raise ValueError(f"activation: {epilogue.activation} needs a floating-point output, not int32")
    if epilogue.bias is not None:
        allowed = (torch.int32,) if is_integer else (*_BIAS_DTYPES, torch.int32)
        if tuple(epilogue.bias.shape) != (n,) or epilogue.bias.dtype not in allowed:
            raise ValueError(
                f"bias: expected ({n},) of {' or '.join(map(str, allowed))}, got {_describe(epilogue.bias)}"
            )
    for name, scale, extent in (("a_scale", epilogue.a_scale, m), ("b_scale", epilogue.b_scale, n)):
        if scale is None:
            continue
        if is_integer:
            raise ValueError(f"{name}: needs a floating-point output, not int32")
        if scale.dtype != torch.float32 or scale.numel() not in (1, extent):
            raise ValueError(f"{name}: expected 1 or {extent} elements of float32, got {_describe(scale)}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
