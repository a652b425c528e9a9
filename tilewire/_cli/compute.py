"""`tilewire matmul`, `softmax`, `add`, `search` and `run`: operands from files, results to files or the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
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
    reported,
    show,
)
from tilewire._options import Activation, Metric, Precision
from tilewire._programs.program import Program

_ACTIVATIONS, _METRICS, _PRECISIONS = (", ".join(get_args(kind)) for kind in (Activation, Metric, Precision))


def matmul(
    a: Annotated[str, typer.Argument(help=OPERAND)],
    b: Annotated[str, typer.Argument(help=OPERAND)],
    bias: Annotated[str | None, typer.Option(help="Added before the activation.")] = None,
    activation: Annotated[str | None, typer.Option(help=f"One of {_ACTIVATIONS}.")] = None,
    transpose_a: Annotated[bool, typer.Option("--transpose-a", help="Swap the last two dimensions of A.")] = False,
    transpose_b: Annotated[bool, typer.Option("--transpose-b", help="Swap the last two dimensions of B.")] = False,
    precision: Annotated[str | None, typer.Option(help=f"One of {_PRECISIONS}.")] = None,
    out_dtype: OutDtypeOption = None,
    out: OutOption = None,
    store: StoreOption = None,
    cast: CastOption = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Multiply two matrices: activation(A @ B + bias)."""
    with connected(url, key, is_json=is_json, cast=cast) as client:
        check_destinations(out, store)
        operands = {"a": operand_of(a), "b": operand_of(b), "bias": None if bias is None else operand_of(bias)}
        options = {"activation": activation, "precision": precision, "out_dtype": dtype_of("--out-dtype", out_dtype)}
        flags = {name: True for name, is_set in (("transpose_a", transpose_a), ("transpose_b", transpose_b)) if is_set}
        show(client.run("matmul", operands, store=store, **options, **flags), out, is_json=is_json)


def softmax(
    x: Annotated[str, typer.Argument(help=OPERAND)],
    axis: Annotated[int, typer.Option(help="Axis that sums to one.")] = -1,
    log: Annotated[bool, typer.Option("--log", help="Log-softmax.")] = False,
    out_dtype: OutDtypeOption = None,
    out: OutOption = None,
    store: StoreOption = None,
    cast: CastOption = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Compute softmax or log-softmax along one axis."""
    with connected(url, key, is_json=is_json, cast=cast) as client:
        check_destinations(out, store)
        options = {"axis": axis, "log": log or None, "out_dtype": dtype_of("--out-dtype", out_dtype)}
        show(client.run("softmax", {"x": operand_of(x)}, store=store, **options), out, is_json=is_json)


def add(
    a: Annotated[str, typer.Argument(help=OPERAND)],
    b: Annotated[str, typer.Argument(help=OPERAND)],
    alpha: Annotated[str | None, typer.Option(metavar="NUMBER", help="out = A + alpha·B.")] = None,
    out_dtype: OutDtypeOption = None,
    out: OutOption = None,
    store: StoreOption = None,
    cast: CastOption = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Add two arrays, broadcasting as NumPy does."""
    with connected(url, key, is_json=is_json, cast=cast) as client:
        check_destinations(out, store)
        options = {"alpha": number_of("--alpha", alpha), "out_dtype": dtype_of("--out-dtype", out_dtype)}
        show(client.run("add", {"a": operand_of(a), "b": operand_of(b)}, store=store, **options), out, is_json=is_json)


def search(
    queries: Annotated[str, typer.Argument(help=OPERAND)],
    items: Annotated[str, typer.Argument(help="Items, one in each row: as QUERIES; usually @name.")],
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Number of items to find.")] = 10,
    metric: Annotated[str | None, typer.Option(help=f"One of {_METRICS}.")] = None,
    out: OutOption = None,
    cast: CastOption = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Find the k best items of each query, exactly: values and indices."""
    with connected(url, key, is_json=is_json, cast=cast) as client:
        operands = {"a": operand_of(queries), "b": operand_of(items)}
        show(client.run("search", operands, k=k, metric=metric), out, is_json=is_json)


def run(
    program: Annotated[str, typer.Argument(help="A .json file, or the name of a program that the server keeps.")],
    inputs: Annotated[list[str] | None, typer.Argument(help="Inputs as NAME=OPERAND.")] = None,
    out: OutOption = None,
    keep: Annotated[
        str | None, typer.Option(help="Also keep the program of the file on the server, under this name.")
    ] = None,
    cast: CastOption = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Run a program: several ops in one request."""
    with reported(is_json=is_json):
        operands = _inputs_of(inputs or ())
        read = Program.read(program) if Path(program).suffix == ".json" else None
        if read is None and keep is not None:
            raise ValueError(f"--keep: {program} is the name of a program that is kept already; give a .json file")
    with connected(url, key, is_json=is_json, cast=cast) as client:
        if read is None:
            answer = client.programs[program].run(operands)
        elif keep is not None:
            answer = client.program(keep, read).run(operands)
        else:
            answer = client.run_program(read, operands)
        show(answer, out, is_json=is_json)


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
