"""`tilewire matmul`, `softmax`, `add`, `search` and `run`: operands from files, results to files or the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, get_args

import typer

from tilewire._cli.session import (
    OPERAND,
    OutDtypeOption,
    StoreOption,
    dtype_of,
    number_of,
    op_command,
    operand_of,
)
from tilewire._clients.client import Client
from tilewire._options import Activation, Metric, Precision
from tilewire._programs.program import Program
from tilewire._types import Answer

_ACTIVATIONS, _METRICS, _PRECISIONS = (", ".join(get_args(kind)) for kind in (Activation, Metric, Precision))


@op_command
def matmul(
    client: Client,
    a: Annotated[str, typer.Argument(help=OPERAND)],
    b: Annotated[str, typer.Argument(help=OPERAND)],
    bias: Annotated[str | None, typer.Option(help="Added before the activation.")] = None,
    activation: Annotated[str | None, typer.Option(help=f"One of {_ACTIVATIONS}.")] = None,
    transpose_a: Annotated[bool, typer.Option("--transpose-a", help="Swap the last two dimensions of A.")] = False,
    transpose_b: Annotated[bool, typer.Option("--transpose-b", help="Swap the last two dimensions of B.")] = False,
    precision: Annotated[str | None, typer.Option(help=f"One of {_PRECISIONS}.")] = None,
    out_dtype: OutDtypeOption = None,
    store: StoreOption = None,
) -> Answer:
    """Multiply two matrices: activation(A @ B + bias)."""
    operands = {"a": operand_of(a), "b": operand_of(b), "bias": None if bias is None else operand_of(bias)}
    options = {"activation": activation, "precision": precision, "out_dtype": dtype_of("--out-dtype", out_dtype)}
    flags = {name: True for name, is_set in (("transpose_a", transpose_a), ("transpose_b", transpose_b)) if is_set}
    return client.run("matmul", operands, store=store, **options, **flags)


@op_command
def softmax(
    client: Client,
    x: Annotated[str, typer.Argument(help=OPERAND)],
    axis: Annotated[int, typer.Option(help="Axis that sums to one.")] = -1,
    log: Annotated[bool, typer.Option("--log", help="Log-softmax.")] = False,
    out_dtype: OutDtypeOption = None,
    store: StoreOption = None,
) -> Answer:
    """Compute softmax or log-softmax along one axis."""
    options = {"axis": axis, "log": log or None, "out_dtype": dtype_of("--out-dtype", out_dtype)}
    return client.run("softmax", {"x": operand_of(x)}, store=store, **options)


@op_command
def add(
    client: Client,
    a: Annotated[str, typer.Argument(help=OPERAND)],
    b: Annotated[str, typer.Argument(help=OPERAND)],
    alpha: Annotated[str | None, typer.Option(metavar="NUMBER", help="out = A + alpha·B.")] = None,
    out_dtype: OutDtypeOption = None,
    store: StoreOption = None,
) -> Answer:
    """Add two arrays, broadcasting as NumPy does."""
    options = {"alpha": number_of("--alpha", alpha), "out_dtype": dtype_of("--out-dtype", out_dtype)}
    return client.run("add", {"a": operand_of(a), "b": operand_of(b)}, store=store, **options)


@op_command
def search(
    client: Client,
    queries: Annotated[str, typer.Argument(help=OPERAND)],
    items: Annotated[str, typer.Argument(help="Items, one in each row: as QUERIES; usually @name.")],
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Number of items to find.")] = 10,
    metric: Annotated[str | None, typer.Option(help=f"One of {_METRICS}.")] = None,
) -> Answer:
    """Find the k best items of each query, exactly: values and indices."""
    operands = {"a": operand_of(queries), "b": operand_of(items)}
    return client.run("search", operands, k=k, metric=metric)


@op_command
def run(
    client: Client,
    program: Annotated[str, typer.Argument(help="A .json file, or the name of a program that the server keeps.")],
    inputs: Annotated[list[str] | None, typer.Argument(help="Inputs as NAME=OPERAND.")] = None,
    keep: Annotated[
        str | None, typer.Option(help="Also keep the program of the file on the server, under this name.")
    ] = None,
) -> Answer:
    """Run a program: several ops in one request."""
    operands = _inputs_of(inputs or ())
    read = Program.read(program) if Path(program).suffix == ".json" else None
    if read is None and keep is not None:
        raise ValueError(f"--keep: {program} is the name of a program that is kept already; give a .json file")
    if read is None:
        return client.programs[program].run(operands)
    if keep is not None:
        return client.program(keep, read).run(operands)
    return client.run_program(read, operands)


def _inputs_of(texts: Iterable[str]) -> dict[str, object]:
    inputs: dict[str, object] = {}
    for text in texts:
        name, equals, operand = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{text!r}: expected an input as NAME=OPERAND, e.g. x=x.npy")
        if name in inputs:
            raise ValueError(f"{text!r}: the input {name} is given twice")
        inputs[name] = operand_of(operand)
    return inputs
