"""The commands of the server's side. Owns their arguments; each command's work is in a file of its own.

`tilewire._cli.app` has the commands of the client's side and brings these in when one of them is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from tilewire._variables import KEY_VARIABLE, URL_VARIABLE
from tilewire.service.cli import precompile as precompiling
from tilewire.service.cli.launch import running_server
from tilewire.service.cli.serve import EXIT_FAILED, EXIT_USAGE, PROBE_TIMEOUT_S, serve
from tilewire.service.config.settings import Settings
from tilewire.service.keys import KeysError, entry_for, make_key

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The server's side of the tilewire command.")
app.command()(serve)

BENCHMARKS = (
    "kernels",
    "batching",
    "random",
    "shared_memory",
    "http",
    "gateway",
    "grpc",
    "settings",
    "start",
    "client",
    "ring",
    "hosts",
    "overload",
    "resident",
)


@app.command()
def demo(
    url: Annotated[
        str | None,
        typer.Argument(envvar=URL_VARIABLE, help="A running server; without it, one that answers here or a fresh one."),
    ] = None,
    key: Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help="API key of the server.")] = None,
) -> None:
    """Upload a weight, post products in every format, check each against NumPy, print latencies and TFLOP/s."""
    # Imported here and not above: NumPy and the client would be a third of the time that `serve` takes to begin.
    import tilewire  # noqa: PLC0415
    from tilewire.service.cli import demo as demonstration  # noqa: PLC0415

    settings = Settings()
    here = f"http://{settings.host}:{settings.port}"
    if url is not None or tilewire.Client(here, timeout=PROBE_TIMEOUT_S).ready():
        raise typer.Exit(demonstration.run(url or here, key=key))
    typer.echo("no server answers there: starting one")
    with running_server() as fresh:
        status = demonstration.run(fresh)
    raise typer.Exit(status)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(help=f"Which one: {', '.join(BENCHMARKS)}; the rest is its own."),
    ],
) -> None:
    """Run a benchmark of a checkout and print what it measured."""
    if name not in BENCHMARKS:
        typer.echo(f"bench: no benchmark {name!r}; there are {', '.join(BENCHMARKS)}", err=True)
        raise typer.Exit(EXIT_USAGE)
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks").is_dir():
        typer.echo(
            "bench: the benchmarks are in the repository, not in the package; run this from a checkout", err=True
        )
        raise typer.Exit(EXIT_USAGE)
    # For this process, and for those that a benchmark starts: no child looks into the working folder.
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    # By name: a server that is installed without the repository has no benchmarks to import.
    raise typer.Exit(importlib.import_module(f"benchmarks.bench_{name}").run(context.args))


@app.command()
def tune(
    ops: Annotated[str, typer.Option(help="Comma-separated: what to tune.")] = "matmul,softmax",
    seconds: Annotated[float, typer.Option(help="For compiling candidates and measuring them.", min=1.0)] = 460.0,
    measured: Annotated[Path, typer.Option(help="Folder for what is measured; a second run adds to it.")] = Path(
        "tilewire-measured"
    ),
    out: Annotated[Path | None, typer.Option(help="The table; by default the chip's own, in the package.")] = None,
) -> None:
    """Measure kernels on this machine's GPU and write its table: what dispatch chooses from."""
    raise typer.Exit(_kernels_command().run(ops.split(","), seconds, measured, out))


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="matmul or softmax.")],
    sizes: Annotated[str, typer.Argument(help="MxNxK of a product, ROWSxN of a softmax.")],
    dtype: Annotated[str, typer.Option(help="Of the inputs.")] = "bfloat16",
    precision: Annotated[str, typer.Option(help="Of float32 and float8 products.")] = "ieee",
    device: Annotated[str, typer.Option(help="A known device, e.g. nvidia_h200; by default this machine's.")] = "",
) -> None:
    """Say in one line which configuration a shape gets, and why."""
    raise typer.Exit(_kernels_command().explain(op, sizes, dtype, precision, device))


def _kernels_command() -> ModuleType:
    # By name: what it imports brings torch and Triton.
    return importlib.import_module("tilewire.service.cli.tune")


@app.command()
def key(name: Annotated[str, typer.Argument(help="For logs and metrics: who holds the key.")]) -> None:
    """Make an API key: the key on standard error, for its holder; its entry on standard output, for --api-keys-file."""
    secret = make_key()
    try:
        entry = entry_for(name, secret)
    except KeysError as error:
        typer.echo(f"key: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    typer.echo(f"key, shown once: {secret}", err=True)
    typer.echo(entry)


@app.command()
def precompile(
    target: Annotated[
        list[str],
        typer.Option(
            help="cuda:80, cuda:90, cuda:100, hip:gfx90a, hip:gfx942 or hip:gfx950; may be given several times."
        ),
    ],
    cache: Annotated[
        Path | None, typer.Option(help="The folder; without it, that of Triton (TRITON_CACHE_DIR).")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 for one on each core.")] = 0,
) -> None:
    """Compile every kernel of devices that need not be here into the cache that a server reads."""
    try:
        precompiling.run(target, cache, workers, Console())
    except (ValueError, precompiling.Failed) as error:
        typer.echo(f"tilewire: {error}", err=True)
        raise typer.Exit(EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED) from None


if __name__ == "__main__":
    app()
