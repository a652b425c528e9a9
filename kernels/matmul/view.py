"""Converts shapes and strides of a product to the form that the kernels take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewire.kernels.matmul.configs import Problem
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.rows import MAX_COUNT
from tilewire.kernels.runtime.strides import Extent, broadcast_strides, collapse

Strides = tuple[int, int, int, int]
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class View:
    """Three tensors as one batched product over at most two batch dimensions.

    Attributes:
        m: rows of op(a).
        n: columns of op(b).
        k: the summed dimension.
        batch: extents of the batch dimensions, (outer, inner).
        a: strides of op(a): (outer, inner, m, k).
        b: strides of op(b): (outer, inner, k, n).
        out: strides of the output: (outer, inner, m, n).
        is_turned: whether this is the product of `b` and `a` turned over, whose output is that of the product turned over.
    """

    m: int
    n: int
    k: int
    batch: tuple[int, int]
    a: Strides
    b: Strides
    out: Strides
    is_turned: bool = False


def view_of(a: Extent, b: Extent, out: Extent, *, is_row_scaled: bool, can_turn: bool = True) -> View | None:
    """The product as the kernels walk it; None when its batch dimensions do not merge into two.

    One column is computed as one row, since there are kernels for few rows.

    Args:
        a: (…, M, K).
        b: (…, K, N).
        out: (…, M, N).
        is_row_scaled: whether each row of one batch entry has its own scale, which forbids merging entries.
        can_turn: whether rows and columns may change places: they may not where columns have a bias, nor where a row's bits
            must not depend on the number of rows.
    """
    shape = out.shape[:-2]
    strides_a = broadcast_strides(a.shape[:-2], a.strides[:-2], shape)
    strides_b = broadcast_strides(b.shape[:-2], b.strides[:-2], shape)
    batch, strides = collapse(shape, strides_a, strides_b, out.strides[:-2], rank=2)
    if len(batch) > 2:
        return None
    (outer, inner), ((outer_a, inner_a), (outer_b, inner_b), (outer_out, inner_out)) = batch, strides
    # One column whose elements follow one another lies along K, from whose start alone its alignment depends.
    step_n = b.step(-1) if b.strides[-2] == 1 else b.strides[-1]
    view = View(
        *(a.shape[-2], b.shape[-1], a.shape[-1]),
        (outer, inner),
        (outer_a, inner_a, a.step(-2), a.strides[-1]),
        (outer_b, inner_b, b.step(-2), step_n),
        (outer_out, inner_out, out.step(-2), out.strides[-1]),
    )
    view = view if is_row_scaled else _fold(view)
    return _turned(view) if can_turn and view.n == 1 < view.m and view.out[2] == 1 else view


def _turned(view: View) -> View:
    """One row that is one column turned over."""
    (outer_a, inner_a, step_m, step_ak), (outer_b, inner_b, step_bk, _), (outer, inner, step_out, _) = (
        view.a,
        view.b,
        view.out,
    )
    turned = ((outer_b, inner_b, 0, step_bk), (outer_a, inner_a, step_ak, step_m), (outer, inner, 0, step_out))
    return View(view.n, view.m, view.k, view.batch, *turned, is_turned=True)


def _fold(view: View) -> View:
    """One taller product where every batch entry uses the same `b`, and the rows follow one another and are not too many."""
    outer, inner = view.batch
    step_a = view.a[2] if view.m > 1 else view.a[1]
    step_out = view.out[2] if view.m > 1 else view.out[1]
    follows = view.a[1] == view.m * step_a and view.out[1] == view.m * step_out
    if outer > 1 or inner == 1 or view.b[1] != 0 or not follows or inner * view.m > MAX_COUNT:
        return view
    of_a, of_out = (0, 0, step_a, view.a[3]), (0, 0, step_out, view.out[3])
    return View(inner * view.m, view.n, view.k, (1, 1), of_a, view.b, of_out)


def problem_of(
    view: View, dtype: str, out_dtype: str, precision: str, *, are_in_aligned: tuple[bool, bool], is_out_aligned: bool
) -> Problem:
    """Returns the problem that the choice of a kernel depends on.

    Args:
        view: the product.
        dtype: of the inputs.
        out_dtype: of the output.
        precision: how float32 and float8 inputs are multiplied.
        are_in_aligned: whether the operands that were given as `a` and `b` start at multiples of 16 bytes.
        is_out_aligned: whether the output does.
    """
    if view.is_turned:
        are_in_aligned = are_in_aligned[::-1]
    majors = {"a": _major(view.a[2:], ("m", "k"), "k"), "b": _major(view.b[2:], ("k", "n"), "n")}
    in_unit, out_unit = (_VECTOR_BYTES // ITEM_BYTES[name] for name in (dtype, out_dtype))
    extents = {"m": view.m, "n": view.n, "k": view.k, "any": 1}
    rows_a = (_row_step(view.a, majors["a"], "mk"), *view.a[:2])
    rows_b = (_row_step(view.b, majors["b"], "kn"), *view.b[:2])
    starts_a, starts_b = (
        start and all(step % in_unit == 0 for step in rows)
        for start, rows in zip(are_in_aligned, (rows_a, rows_b), strict=True)
    )
    extents_a = (view.k, view.m) if majors["a"] == "k" else (view.m, view.k)
    extents_b = (view.n, view.k) if majors["b"] == "n" else (view.k, view.n)
    has_boxes = view.batch[0] == 1 and 0 not in (view.m, view.n, view.k)
    starts_out = is_out_aligned and view.out[3] == 1 and all(step % out_unit == 0 for step in view.out[:3])
    fills_in = all(extents[major] % in_unit == 0 for major in majors.values())
    return Problem(
        *(view.m, view.n, view.k, math.prod(view.batch)),
        *(dtype, out_dtype, majors["a"], majors["b"], precision),
        is_aligned_in=starts_a and starts_b and fills_in,
        is_aligned_out=starts_out,
        is_padded_a=starts_a and has_boxes and _is_spread(rows_a[0], *extents_a),
        is_padded_b=starts_b and has_boxes and _is_spread(rows_b[0], *extents_b),
        is_copyable=has_boxes,
        is_boxed_out=starts_out
        and view.n % out_unit == 0
        and view.batch[0] == 1
        and _is_spread(view.out[2], view.n, view.m),
    )


def _major(strides: Sequence[int], names: tuple[str, str], prefer: str) -> str:
    """The dimension with stride 1, `prefer` when both have it."""
    unit = [name for name, stride in zip(names, strides, strict=True) if stride == 1]
    return "any" if not unit else prefer if prefer in unit else unit[0]


def _row_step(strides: Strides, major: str, names: str) -> int:
    """Stride of the dimension that is not `major`; 1, which divides nothing, when neither is."""
    return 1 if major == "any" else strides[2 + 1 - names.index(major)]


def _is_spread(step: int, length: int, count: int) -> bool:
    return count == 1 or step >= length
