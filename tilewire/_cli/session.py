"""Shared parts of the client's commands: the address, the output as text or JSON, and the exit status."""

from __future__ import annotations

import inspect
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from tilewire import _output
from tilewire._arrays.dtypes import dtype_name
from tilewire._arrays.files import Source, replacing
from tilewire._arrays.host import HostArray, to_safetensors
from tilewire._arrays.operands import DtypeNotTaken
from tilewire._clients.client import Client
from tilewire._errors import TilewireError, Unauthorized
from tilewire._transport.wire import DEFAULT_URL
from tilewire._types import Answer
from tilewire._variables import KEY_VARIABLE, URL_VARIABLE

EXIT_FAILED = 1
EXIT_USAGE = 2
MIN_SECONDS = 0.1
# A year. Clocks of the system overflow beyond some hundreds of years.
MAX_SECONDS = 365 * 86_400.0
# Largest whole number up to which each one is a float64.
_MAX_EXACT = 2**53

# Help of an operand.
OPERAND = "A .npy, .npz or .safetensors file, @name of a resident tensor, or JSON such as [[1, 2], [3, 4]]."
UrlOption = Annotated[str, typer.Option("--url", envvar=URL_VARIABLE, help="Address of the server.")]
KeyOption = Annotated[str | None, typer.Option("--key", envvar=KEY_VARIABLE, help="API key.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs; NaN and infinities are bare.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", readable=False, help="File for the result: .npy, .npz, .safetensors or .json."),
]
StoreOption = Annotated[str | None, typer.Option(help="Name under which the result stays on the server.")]
OutDtypeOption = Annotated[str | None, typer.Option(help="Dtype of the result, as float16.")]
CastOption = Annotated[
    str | None, typer.Option(help="Dtype for arrays of a dtype that is not taken, as float32 for float64.")
]

URL = DEFAULT_URL


@contextmanager
def connected(url: str, key: str | None, *, is_json: bool = False, cast: str | None = None) -> Iterator[Client]:
    """Makes a client, and turns its errors into one line and an exit status.

    Args:
        url: Address of the server.
        key: API key.
        is_json: Whether errors are printed as JSON.
        cast: As for `Client`.
    """
    with reported(is_json=is_json), Client(url, api_key=key, cast=dtype_of("--cast", cast)) as client:
        yield client


@contextmanager
def reported(*, is_json: bool = False) -> Iterator[None]:
    """Turns errors into one line and an exit status: 2 for what the caller can change, 1 for what the server said."""
    try:
        yield
    except TilewireError as error:
        how = f"; type --key KEY, or set {KEY_VARIABLE}" if isinstance(error, Unauthorized) else ""
        fail(error.detail + how, EXIT_FAILED, is_json=is_json, status=error.status, request_id=error.request_id)
    except DtypeNotTaken as error:
        fail(error.saying("type --cast float32"), EXIT_USAGE, is_json=is_json)
    except BrokenPipeError:
        # Who read the output has left: nobody is told.
        raise
    except (TypeError, ValueError, OSError, ImportError) as error:
        fail(str(error), EXIT_USAGE, is_json=is_json)


def dtype_of(option: str, text: str | None) -> str | None:
    """Reads the dtype of an option.

    Raises:
        TypeError: Not a dtype; the message begins with the option.
    """
    return None if text is None else dtype_name(text, option)


def number_of(option: str, text: str | None) -> int | float | None:
    """Reads the number of an option, exactly: `9007199254740993` is no float64.

    A float that is whole, as `2.0`, is one for arrays of integers, too.

    Raises:
        ValueError: Not a number; the message begins with the option.
    """
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{option}: {text!r} is no number") from None
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT else value


def check_seconds(option: str, seconds: float) -> None:
    """Refuses a length of time that cannot be.

    Raises:
        ValueError: Too short, longer than a year, or no number; the message begins with the option.
    """
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ValueError(f"{option}: {seconds} is no length; expected seconds, from {MIN_SECONDS} to a year")


def check_destinations(out: Path | None, store: str | None) -> None:
    """Refuses two places for one result.

    Raises:
        ValueError: Both are given.
    """
    if out is not None and store is not None:
        raise ValueError("--out and --store: give one; `tilewire get` writes what is stored to a file")


def op_command(call: Callable[..., Answer]) -> Callable[..., None]:
    """Makes the command of an op from the function that sends it.

    The command has the function's own arguments, and behind them those of every op: where the result goes, and which
    server is asked. The function takes a client first; its errors become one line and an exit status.
    """

    def command(*, out: Path | None, cast: str | None, url: str, key: str | None, is_json: bool, **own: Any) -> None:
        with connected(url, key, is_json=is_json, cast=cast) as client:
            check_destinations(out, own.get("store"))
            show(call(client, **own), out, is_json=is_json)

    _client, *parameters = inspect.signature(call, eval_str=True).parameters.values()
    for name, option, default in (
        ("out", OutOption, None),
        ("cast", CastOption, None),
        ("url", UrlOption, URL),
        ("key", KeyOption, None),
        ("is_json", JsonOption, False),
    ):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=option))
    command.__name__, command.__doc__ = call.__name__, call.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def fail(message: str, exit_status: int, *, is_json: bool = False, **fields: object) -> None:
    """Prints an error and ends: on standard error, too, where JSON cannot be written."""
    try:
        if is_json:
            print_json({"error": message, **{key: value for key, value in fields.items() if value is not None}})
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        is_json = False
        _output.discard()
    if not is_json:
        typer.echo(f"tilewire: {message}", err=True)
    raise typer.Exit(exit_status)


def say(text: str) -> None:
    """Prints a text and a line's end, without colours where there is no terminal."""
    # Named, for typer prints UTF-8 where the encoding is ASCII.
    typer.echo(text, file=sys.stdout)


def print_json(document: object) -> None:
    """Prints a document in one line; characters that the encoding may lack are escaped."""
    say(json.dumps(document, ensure_ascii=not _output.has_all_characters(), default=_plain))


def operand_of(text: str) -> Any:
    """Reads an operand of the command line: a file, `@name`, or JSON such as `[[1, 2], [3, 4]]` or `0.5`.

    Raises:
        OSError: The file cannot be read.
        ValueError: None of these; the message says which there are.
    """
    if text.startswith("@"):
        return text
    path = Path(text)
    if path.suffix in (".npy", ".npz", ".safetensors"):
        arrays = Source(path).arrays("tensor")
        if len(arrays) != 1:
            raise ValueError(f"{text}: holds {len(arrays)} tensors; an operand is one")
        host = next(iter(arrays.values()))
        return host.numpy()
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, list | int | float):
        return value
    raise ValueError(f"{text!r}: expected a .npy, .npz or .safetensors file, @name, or JSON such as [[1, 2], [3, 4]]")


def show(answer: Answer, out: Path | None, *, is_json: bool) -> None:
    """Prints an answer, or writes it to a file and says so."""
    facts: dict[str, object] = {
        "request_id": answer.request_id,
        "batch_size": answer.batch_size,
        "timings_ms": dict(answer.timings_ms),
    }
    if answer.handle is not None:
        info = answer.handle.described
        stored = {"stored": info.name, "shape": info.shape, "dtype": info.dtype, "bytes": info.nbytes}
        _say({**stored, **facts}, f"stored @{info.name}: {info.dtype} {_shape(info.shape)}", is_json=is_json)
        return
    arrays = {name: np.asarray(array) for name, array in answer.outputs.items()}
    described = {name: {"shape": array.shape, "dtype": array.dtype.name} for name, array in arrays.items()}
    if out is not None:
        write(out, arrays)
        shapes = ", ".join(f"{name}: {array.dtype.name} {_shape(array.shape)}" for name, array in arrays.items())
        _say({"out": str(out), "outputs": described, **facts}, f"{out}: {shapes}", is_json=is_json)
    elif is_json:
        values = {name: {**described[name], "data": array.tolist()} for name, array in arrays.items()}
        print_json({"outputs": values, **facts})
    else:
        for name, array in arrays.items():
            say(f"{name}: {array.dtype.name} {_shape(array.shape)}\n{array}" if len(arrays) > 1 else str(array))


def write(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Writes arrays to a file whose ending says the format. It is replaced whole or not at all.

    Raises:
        OSError: It cannot be written.
        ValueError: A format that cannot carry them.
    """
    foreign = [array.dtype.name for array in arrays.values() if array.dtype.kind == "V"]
    if foreign and path.suffix in (".npy", ".npz"):
        raise ValueError(f"{path}: {path.suffix} files carry no {foreign[0]}; write .safetensors")
    writers = {".npz": _write_npz, ".safetensors": _write_safetensors, ".json": _write_json}
    if len(arrays) == 1:
        writers[".npy"] = _write_npy
    if path.suffix not in writers:
        many = " for several outputs" if len(arrays) > 1 else ""
        raise ValueError(f"{path}: expected a file that ends in {', '.join(writers)}{many}")
    with replacing(path) as partial, partial.open("wb") as file:
        writers[path.suffix](file, arrays)


def _write_safetensors(file: BinaryIO, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    file.writelines(to_safetensors({name: HostArray.of(array) for name, array in arrays.items()}))


def _write_json(file: BinaryIO, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    file.write(json.dumps({name: array.tolist() for name, array in arrays.items()}).encode())


def _write_npy(file: BinaryIO, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    # Through a method: what NumPy itself writes to a file fails without the system's reason.
    into: Any = SimpleNamespace(write=file.write)
    np.lib.format.write_array(into, next(iter(arrays.values())), allow_pickle=False)


def _write_npz(file: BinaryIO, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Writes an npz: `np.savez` takes no array that is called `file` or `allow_pickle`, as its own arguments are."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _say(document: dict[str, object], text: str, *, is_json: bool) -> None:
    if is_json:
        print_json(document)
    else:
        say(text)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
