"""`tilewire put`, `get`, `ls` and `rm`: the resident tensors of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from tilewire._cli.session import EXIT_FAILED, URL, JsonOption, KeyOption, UrlOption, connected, fail, print_json, say
from tilewire._cli.tables import table_lines
from tilewire._errors import BadRequest
from tilewire._types import Placement, TensorInfo

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def put(
    # Here and below not checked by Typer: its errors are boxes, with --json too.
    path: Annotated[Path, typer.Argument(readable=False, help="A .npy, .npz or .safetensors file.")],
    name: Annotated[
        str | None,
        typer.Argument(help="Name, or the prefix of several; the file's name without its ending by default."),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(help="Devices that hold it: auto, replicate, single, or shard for a part on each."),
    ] = None,
    axis: Annotated[
        int | None, typer.Option(help="Axis along which a sharded tensor is cut: -1, its columns, or -2, its rows.")
    ] = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Upload the tensors of a file, which then stay on the server's devices."""
    with connected(url, key, is_json=is_json) as client:
        where = cast("Placement | None", placement)
        stored = [tensor.described for tensor in client.put_file(path, name, placement=where, axis=axis)]
        _print([info for info in stored if info is not None], is_json=is_json)


def get(
    name: Annotated[str, typer.Argument(help="Name of the tensor.")],
    path: Annotated[
        Path | None,
        typer.Argument(readable=False, help="A .npy or .safetensors file; the name's last part with .npy by default."),
    ] = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Download a tensor to a file."""
    with connected(url, key, is_json=is_json) as client:
        written = client.get_file(name, path or Path(f"{name.rpartition('/')[2].removeprefix('@')}.npy"))
        if is_json:
            print_json({"out": str(written), "bytes": written.stat().st_size})
        else:
            say(f"{written}: {_size(written.stat().st_size)}")


def ls(
    prefix: Annotated[str, typer.Argument(help="Only names that begin so; a `*` at the end is taken, too.")] = "",
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """List the tensors that stay on the server's devices."""
    with connected(url, key, is_json=is_json) as client:
        begin = prefix.removesuffix("*")
        listed = [tensor.described for tensor in client.tensors()]
        _print([info for info in listed if info is not None and info.name.startswith(begin)], is_json=is_json)


def rm(
    names: Annotated[list[str], typer.Argument(help="Names of tensors.")],
    url: UrlOption = URL,
    key: KeyOption = None,
    is_json: JsonOption = False,
) -> None:
    """Remove tensors. Those that cannot be removed are named when the others are."""
    with connected(url, key, is_json=is_json) as client:
        removed, failures = [], []
        for name in names:
            try:
                client.delete(name)
            except (BadRequest, ValueError) as error:
                failures.append(str(error))
                continue
            removed.append(name)
            if not is_json:
                say(f"removed {name}")
        if failures:
            message = "; ".join(failures)
            fail(message, EXIT_FAILED, is_json=is_json, removed=removed)
        if is_json:
            print_json({"removed": removed})


def _print(infos: list[TensorInfo], *, is_json: bool) -> None:
    if is_json:
        fields = (
            "name",
            "shape",
            "dtype",
            "nbytes",
            "created",
            "last_used",
            "hits",
            "version",
            "placement",
            "engines",
            "axis",
        )
        print_json([{field: getattr(info, field) for field in fields} for info in infos])
        return
    rows = [
        (
            info.name,
            info.dtype,
            "×".join(map(str, info.shape)) or "scalar",
            _size(info.nbytes),
            "" if info.hits is None else str(info.hits),
        )
        for info in infos
    ]
    titles, *lines = table_lines(("NAME", "DTYPE", "SHAPE", "SIZE", "HITS"), rows, left=("NAME", "DTYPE", "SHAPE"))
    say("\n".join([typer.style(titles, bold=True), *lines]))


def _size(num_bytes: float) -> str:
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
