"""`tilewire topk`, `reduce`, `normalize` and `pointwise`: operands and results as for `matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, get_args

import typer

from tilewire._cli.session import OPERAND, OutDtypeOption, StoreOption, dtype_of, number_of, op_command, operand_of
from tilewire._clients.client import Client
from tilewire._options import BinaryFunction, NormalizeKind, ReduceKind, UnaryFunction
from tilewire._types import Answer

_REDUCTIONS, _NORMS = (", ".join(get_args(kind)) for kind in (ReduceKind, NormalizeKind))
_UNARY, _BINARY = (", ".join(get_args(kind)) for kind in (UnaryFunction, BinaryFunction))


@op_command
def topk(
    client: Client,
    x: Annotated[str, typer.Argument(help=OPERAND)],
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Number of elements to find.")] = 10,
    axis: Annotated[int, typer.Option(help="Axis that is searched.")] = -1,
    smallest: Annotated[bool, typer.Option("--smallest", help="Find the smallest instead of the largest.")] = False,
) -> Answer:
    """Find the k largest or smallest elements along one axis: values and indices."""
    return client.run("topk", {"x": operand_of(x)}, k=k, axis=axis, largest=not smallest)


def _check_order(command: str, word: str, operands: Sequence[str | None], words: Sequence[str]) -> None:
    """Refuses a word that stands behind an operand: it would be read as one.

    Raises:
        ValueError: The message says what to type.
    """
    late = next((text for text in operands if text in words), None)
    if late is not None and word not in words:
        rest = " ".join(text for text in (word, *operands) if text not in (None, late))
        raise ValueError(f"{late}: comes before the operands; type `tilewire {command} {late} {rest}`")


@op_command
def reduce(
    client: Client,
    kind: Annotated[str, typer.Argument(help=f"One of {_REDUCTIONS}.")],
    x: Annotated[str, typer.Argument(help=OPERAND)],
    axis: Annotated[str, typer.Option(help="Axis that is reduced: an integer, or all.")] = "-1",
    keepdims: Annotated[bool, typer.Option("--keepdims", help="Keep the axis, with length 1.")] = False,
    out_dtype: OutDtypeOption = None,
    store: StoreOption = None,
) -> Answer:
    """Reduce one axis, or all, to a number: a sum, a mean, a maximum or its index."""
    _check_order("reduce", kind, (x,), get_args(ReduceKind))
    options = {"kind": kind, "axis": axis, "keepdims": keepdims or None}
    options["out_dtype"] = dtype_of("--out-dtype", out_dtype)
    return client.run("reduce", {"x": operand_of(x)}, store=store, **options)


@op_command
def normalize(
    client: Client,
    kind: Annotated[str, typer.Argument(help=f"One of {_NORMS}.")],
    x: Annotated[str, typer.Argument(help=OPERAND)],
    weight: Annotated[str | None, typer.Option(help="Factor of each element of the axis.")] = None,
    bias: Annotated[str | None, typer.Option(help="Added to each element of the axis.")] = None,
    axis: Annotated[int, typer.Option(help="Axis that is normalized.")] = -1,
    eps: Annotated[str | None, typer.Option(metavar="NUMBER", help="Keeps the divisor from 0.")] = None,
    out_dtype: OutDtypeOption = None,
    store: StoreOption = None,
) -> Answer:
    """Normalize along one axis: layer norm, RMS norm, or to the 2-norm 1."""
    _check_order("normalize", kind, (x,), get_args(NormalizeKind))
    given = {"x": x, "weight": weight, "bias": bias}
    operands = {name: None if text is None else operand_of(text) for name, text in given.items()}
    options = {"kind": kind, "axis": axis, "eps": number_of("--eps", eps)}
    options["out_dtype"] = dtype_of("--out-dtype", out_dtype)
    return client.run("normalize", operands, store=store, **options)


@op_command
def pointwise(
    client: Client,
    fn: Annotated[str, typer.Argument(help=f"With Y one of {_BINARY}; without {_UNARY}.")],
    x: Annotated[str, typer.Argument(help=OPERAND)],
    y: Annotated[str | None, typer.Argument(help="As X; both broadcast.")] = None,
    scale: Annotated[str | None, typer.Option(metavar="NUMBER", help="Factor of the result.")] = None,
    shift: Annotated[str | None, typer.Option(metavar="NUMBER", help="Added to it.")] = None,
    out_dtype: OutDtypeOption = None,
    store: StoreOption = None,
) -> Answer:
    """Compute a function of each element, times a scale plus a shift."""
    _check_order("pointwise", fn, (x, y), (*get_args(UnaryFunction), *get_args(BinaryFunction)))
    operands = {"x": operand_of(x), "y": None if y is None else operand_of(y)}
    options = {"fn": fn, "scale": number_of("--scale", scale), "shift": number_of("--shift", shift)}
    options["out_dtype"] = dtype_of("--out-dtype", out_dtype)
    return client.run("pointwise", operands, store=store, **options)
