"""`tilewire topk`, `reduce`, `normalize` and `pointwise`: operands and results as for `matmul`."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from tilewire._cli.session import (
    OPERAND,
    URL,
    CastOption,
    JsonOption,
    KeyOption,
    OutDtypeOption,
    OutOption,
    StoreOption,
    UrlOption,
    check_destinations,
    connected,
    dtype_of,
    number_of,
    operand_of,
    show,
)
from tilewire._options import BinaryFunction, NormalizeKind, ReduceKind, UnaryFunction

_REDUCTIONS, _NORMS = (", ".join(get_args(kind)) for kind in (ReduceKind, NormalizeKind))
_UNARY, _BINARY = (", ".join(get_args(kind)) for kind in (UnaryFunction, BinaryFunction))


def topk(
    x: Annotated[str, typer.Argument(help=OPERAND)],
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Number of elements to find.")] = 10,
    axis: Annotated[int, typer.Option(help="Axis that is searched.")] = -1,
    smallest: Annotated[bool, typer.Option("--smallest", help="Find the smallest instead of the largest.")] = False,
    out: OutOption = None,
    cast: CastOption = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Find the k largest or smallest elements along one axis: values and indices."""
    with connected(url, key, is_json=is_json, cast=cast) as client:
        answer = client.run("topk", {"x": operand_of(x)}, k=k, axis=axis, largest=not smallest)
        show(answer, out, is_json=is_json)


def reduce(
    kind: Annotated[str, typer.Argument(help=f"One of {_REDUCTIONS}.")],
    x: Annotated[str, typer.Argument(help=OPERAND)],
    axis: Annotated[str, typer.Option(help="Axis that is reduced: an integer, or all.")] = "-1",
    keepdims: Annotated[bool, typer.Option("--keepdims", help="Keep the axis, with length 1.")] = False,
    out_dtype: OutDtypeOption = None,
    out: OutOption = None,
    store: StoreOption = None,
    cast: CastOption = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Reduce one axis, or all, to a number: a sum, a mean, a maximum or its index."""
    with connected(url, key, is_json=is_json, cast=cast) as client:
        check_destinations(out, store)
        options = {"kind": kind, "axis": axis, "keepdims": keepdims or None}
        options["out_dtype"] = dtype_of("--out-dtype", out_dtype)
        show(client.run("reduce", {"x": operand_of(x)}, store=store, **options), out, is_json=is_json)


def normalize(
    kind: Annotated[str, typer.Argument(help=f"One of {_NORMS}.")],
    x: Annotated[str, typer.Argument(help=OPERAND)],
    weight: Annotated[str | None, typer.Option(help="Factor of each element of the axis.")] = None,
    bias: Annotated[str | None, typer.Option(help="Added to each element of the axis.")] = None,
    axis: Annotated[int, typer.Option(help="Axis that is normalized.")] = -1,
    eps: Annotated[str | None, typer.Option(metavar="NUMBER", help="Keeps the divisor from 0.")] = None,
    out_dtype: OutDtypeOption = None,
    out: OutOption = None,
    store: StoreOption = None,
    cast: CastOption = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Normalize along one axis: layer norm, RMS norm, or to the 2-norm 1."""
    with connected(url, key, is_json=is_json, cast=cast) as client:
        check_destinations(out, store)
        given = {"x": x, "weight": weight, "bias": bias}
        operands = {name: None if text is None else operand_of(text) for name, text in given.items()}
        options = {"kind": kind, "axis": axis, "eps": number_of("--eps", eps)}
        options["out_dtype"] = dtype_of("--out-dtype", out_dtype)
        show(client.run("normalize", operands, store=store, **options), out, is_json=is_json)


def pointwise(
    fn: Annotated[str, typer.Argument(help=f"With Y one of {_BINARY}; without {_UNARY}.")],
    x: Annotated[str, typer.Argument(help=OPERAND)],
    y: Annotated[str | None, typer.Argument(help="As X; both broadcast.")] = None,
    scale: Annotated[str | None, typer.Option(metavar="NUMBER", help="Factor of the result.")] = None,
    shift: Annotated[str | None, typer.Option(metavar="NUMBER", help="Added to it.")] = None,
    out_dtype: OutDtypeOption = None,
    out: OutOption = None,
    store: StoreOption = None,
    cast: CastOption = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Compute a function of each element, times a scale plus a shift."""
    with connected(url, key, is_json=is_json, cast=cast) as client:
        check_destinations(out, store)
        operands = {"x": operand_of(x), "y": None if y is None else operand_of(y)}
        options = {"fn": fn, "scale": number_of("--scale", scale), "shift": number_of("--shift", shift)}
        options["out_dtype"] = dtype_of("--out-dtype", out_dtype)
        show(client.run("pointwise", operands, store=store, **options), out, is_json=is_json)
